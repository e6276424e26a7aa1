"""The verb `ds-harness checkpoint merge`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from harness.errors import UserError, reason
from harness.verb_parser import VerbParser, path_argument
from harness.wording import counted

DESCRIPTION = """Merge adapters into their base model, a layer at a time. The merged model has the base model's dtype,
files, config and tokenizer."""
EXAMPLE = """example:
  ds-harness checkpoint merge runs/lora merged
  ds-harness checkpoint merge runs/lora merged --adapters runs/style --base path/to/model"""


def merge_command(argv: Sequence[str]) -> int:
    """Merge adapters; returns the exit code. UserError if that is not possible."""
    parser = VerbParser("checkpoint merge", DESCRIPTION, EXAMPLE)
    parser.add_argument("run", type=path_argument, metavar="RUN", help="a run's output_dir, a checkpoint, or adapters")
    parser.add_argument("out", type=path_argument, metavar="OUT", help="a new directory for the merged model")
    parser.add_argument(
        "--adapters", type=path_argument, nargs="+", metavar="DIR", help="more adapters, merged afterwards"
    )
    parser.add_argument("--base", help="the base model; default: the one that RUN names")
    args = parser.parse_args(argv)
    merge_adapters([args.run, *(args.adapters or ())], args.out, args.base)
    return 0


def merge_adapters(adapters: Sequence[Path], out: Path, base: str | None = None) -> None:
    """Merge adapters as `merge` does, and say so. UserError if that is not possible."""
    from transformers.utils.logging import disable_progress_bar

    from harness.extras.lora import INSTALL
    from harness.extras.merging.merge import merge

    if find_spec("peft") is None:
        raise UserError(INSTALL)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    try:
        merged_into = merge(adapters, out, base)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {reason(error, out)}") from error
    print(f"{out}: {counted(len(adapters), 'adapter')} merged into {merged_into}")
