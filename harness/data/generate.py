"""The verb `ds-harness generate`: let a trained model continue or answer a prompt, with plain transformers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoint.integrity import is_checkpoint, require_listed_weights
from harness.checkpoint.listed import listed_files
from harness.data.stops import listed, stop_tokens, with_stop_tokens
from harness.data.templates import Template
from harness.data.tokenizer import MARK, require_vocabulary
from harness.errors import UserError, headline
from harness.hf.locate import ADAPTERS, model_directory
from harness.verb_parser import Boolean, VerbParser, name_or_path, number, whole_number

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

EXAMPLE = """example:
  ds-harness generate runs/demo --prompt "def " --temperature 0"""


def generate(argv: Sequence[str]) -> int:
    """Print the prompt with its continuation, or the answer of a chat model. UserError if the model does not load."""
    parser = VerbParser("generate", "Let a trained model continue a prompt, or answer it.", EXAMPLE)
    parser.add_argument(
        "model", type=name_or_path, metavar="MODEL_DIR", help="output_dir of a run, a checkpoint of it, or any model"
    )
    parser.add_argument("--prompt", required=True, help='text to continue or to answer; "-": standard input')
    parser.add_argument("--max_new_tokens", type=whole_number, default=300, help="most tokens to add")
    parser.add_argument("--temperature", type=number, default=0.5, help="0: always the most likely token")
    parser.add_argument(
        "--seed", type=partial(whole_number, most=2**63 - 1), default=0, help="seed of the choice of tokens"
    )
    parser.add_argument(
        "--chat",
        action=Boolean,
        default=None,
        help="put the prompt into the chat template as a user's message (default: true if the tokenizer has one)",
    )
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1 or not 0 <= args.temperature < inf:
        parser.error("--max_new_tokens must be at least 1 and --temperature at least 0")
    tokenizer, model = _load(args.model)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    chat = brings_template(tokenizer) if args.chat is None else args.chat
    ids = prompt_ids(tokenizer, prompt, chat=chat)
    if chat:  # a base model's config may name another token than the one with which the template ends an answer
        model.generation_config = with_stop_tokens(model.generation_config, stop_tokens(tokenizer))
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    made = _continued(model, ids, padding, args)
    print(tokenizer.decode(made[len(ids) :] if chat else made, skip_special_tokens=True))
    return 0


def _load(name: str) -> tuple[PreTrainedTokenizerBase, Any]:
    """Load the tokenizer and the model of a directory, a preset or a hub id; adapters are loaded with their base model.

    In a checkpoint, only files listed in its manifest are read.

    Raises:
        UserError: loading fails, or a checkpoint contains weights that are not in its manifest.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
    from transformers.utils import logging

    from harness.hf.skeleton import is_composite
    from harness.hf.unbuilt import make_loadable

    directory = Path(name) if (Path(name) / ADAPTERS).is_file() else model_directory(name, "MODEL_DIR")
    require_listed_weights(directory)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with listed_files(directory) if is_checkpoint(directory) else nullcontext(directory) as folder:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            make_loadable(folder)
            has_config = (folder / "config.json").is_file()  # unlike adapters
            is_whole = has_config and is_composite(AutoConfig.from_pretrained(folder, local_files_only=True))
            auto = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
            model = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a broken file raises whatever the code that meets it raises
            reason = headline(error).replace(str(folder), str(directory))
            kind = "" if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: "
            raise UserError(f"cannot load {directory}: {kind}{reason}") from error
    _require_ids(model.generation_config, directory)
    require_vocabulary(tokenizer, directory)
    return tokenizer, model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _require_ids(config: GenerationConfig, directory: Path) -> None:
    """Raise UserError for a generation_config.json whose special tokens are not ids."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not all(isinstance(each, int) for each in listed(getattr(config, name, None))):
            raise UserError(f"{directory}: {name} of its generation_config.json is not a number: correct or remove it")


def brings_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer has a chat template other than the bytes tokenizer's, which always has one."""
    return bool(tokenizer.chat_template) and MARK not in getattr(tokenizer, "init_kwargs", {})


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool) -> list[int]:
    """Tokenise the prompt; with `chat`, as a user's message in the chat template. UserError for an empty prompt."""
    if chat:
        if not tokenizer.chat_template:
            raise UserError("--chat: the tokenizer has no chat template")
        text = Template(tokenizer).write([{"role": "user", "content": prompt}], None, "--chat", prompt=True)
        asked: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return asked
    found: list[int] = tokenizer(prompt)["input_ids"]
    if not found:
        raise UserError("--prompt is empty: give some text")
    return found


def _continued(model: Any, ids: list[int], padding: int | None, args: argparse.Namespace) -> list[int]:
    import torch

    from harness.parallel.generators import own_generators

    inputs = torch.tensor([ids], device=model.device)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature > 0 else {"do_sample": False}
    with own_generators(args.seed, model.device):
        made = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=args.max_new_tokens,
            pad_token_id=padding,
            **sampling,
        )[0]
    whole: list[int] = made.tolist()
    return whole
