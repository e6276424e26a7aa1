"""The verb `ds-harness verify`: certify a config for a model, or compare the metrics of two programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from harness.arguments import TrainingArguments
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.hf.locate import DEFAULT_MODEL
from harness.topology.env import inherited, replace_environment
from harness.verb_parser import VerbParser, name_or_path, path_argument, positive

if TYPE_CHECKING:
    from harness.verify.trials.trial import TrialResult

DESCRIPTION = """Train a tiny copy of a model in the layout of a DeepSpeed JSON, on this machine's processor, and again
by plain torch and transformers in one process; compare losses, gradient norms, evaluations and weights, also after a
save and a resume. Write a certificate, which runs of this config and model copy into run.json.

With --against: compare the losses of a run with those of another program, and name the first step at which they
differ by more than rounding."""
ARGUMENTS = (
    *("bf16", "fp16", "pipeline_parallel_size", "tensor_parallel_size", "expert_parallel_size"),
    *("context_parallel_size", "gradient_checkpointing", "max_grad_norm", "optim"),
)
"""The arguments of a run that this verb takes."""
EXAMPLE = f"""exit codes: 0 equal; 1 different, refused, not verified, or no such file; 2 unusable arguments

example:
  ds-harness verify --model_name_or_path {DEFAULT_MODEL} --deepspeed_config pipeline_3d --output certificate.json
  ds-harness verify runs/mine --against trainer_state.json"""


def verify(argv: Sequence[str]) -> int:
    """Certify a config, or compare two runs; return 0 if all is equal."""
    parser = VerbParser("verify", DESCRIPTION, EXAMPLE)
    parser.add_argument("run", nargs="?", type=path_argument, help="with --against: an output_dir, or a metrics file")
    parser.add_argument(
        "--model_name_or_path", type=name_or_path, help="a preset's name, or a directory with HuggingFace's config.json"
    )
    parser.add_argument("--deepspeed_config", type=name_or_path, help="DeepSpeed JSON: a file or a preset's name")
    parser.add_run_arguments(ARGUMENTS)
    parser.add_argument("--world_size", type=positive, help="ranks of the run (default: as few as the config runs on)")
    cache = "only the cache in which runs look for it"
    parser.add_argument("--output", type=path_argument, help=f"file of the certificate (default: {cache})")
    parser.add_argument(
        "--against", type=path_argument, help="metrics of another program: .jsonl, .json, .csv or a log"
    )
    args = parser.parse_args(argv)
    if args.against is not None:
        if args.run is None:
            parser.error("--against needs the run to compare with: ds-harness verify OUTPUT_DIR --against FILE")
        from harness.verify.trials.against import compare_files

        said, same = compare_files(args.run, args.against)
        print(said)
        return 0 if same else 1
    if args.run is not None:
        parser.error("a run is compared with --against FILE")
    if args.model_name_or_path is None or args.deepspeed_config is None:
        parser.error("--model_name_or_path and --deepspeed_config are both needed")
    given = {name: getattr(args, name) for name in ARGUMENTS if getattr(args, name) is not None}
    arguments = TrainingArguments(deepspeed_config=args.deepspeed_config, **given)
    return _certify(args.model_name_or_path, arguments, args.world_size, args.output)


def _certify(model: str, arguments: TrainingArguments, world_size: int | None, output: Path | None) -> int:
    if output is not None:
        _write(output, "", "a")  # find out now whether it can be written: the trial takes a minute
    from harness.report import certificate
    from harness.verify.trials.launch import QUIET

    replace_environment({**inherited(), **QUIET})  # DeepSpeed reads it when it is imported, which comes next
    from harness.verify.trials.certify import certify, described

    def say(verdict: TrialResult) -> None:
        print(f"tried: {described(verdict)}", file=sys.stderr, flush=True)

    found = certify(model, arguments, say, world_size)
    if output is not None:
        _write(output, json.dumps(found, indent=2) + "\n")
    if found["compared"] and certificate.store(found) is None:
        print("the certificate cannot be kept for runs: set XDG_CACHE_HOME to a folder of yours", file=sys.stderr)
    print(table(found))
    if found["verdict"] != certificate.EQUAL:
        raise UserError(f"{arguments.deepspeed_config}: {found['verdict']}: {found['reason']}")
    return 0


def _write(output: Path, text: str, mode: Literal["w", "a"] = "w") -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error.strerror or error}") from error


def table(found: JsonObject) -> str:
    """Return a certificate as text: what was compared, and the largest differences."""
    names = ("loss", "norm", "evaluation", "weights")
    rows = [("compared", "layout", "steps", *names, "")]
    for row in found["compared"]:
        numbers = row["largest"] or {}
        shown = [f"{numbers[name]:.1e}" if name in numbers else "-" for name in names]
        rows.append((row["what"], row["layout"], str(row["steps"]), *shown, row["verdict"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = lines if found["compared"] else []
    return "\n".join([*lines, *(f"left out: {text}" for text in found["left_out"]), f"verdict: {found['verdict']}"])
