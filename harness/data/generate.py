"""The verb `ds-harness generate`: let a trained model continue or answer a prompt, with plain transformers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any

from harness.checkpoint.generation import brings_template, load, padding_id, prompt_ids
from harness.data.stops import stop_tokens, with_stop_tokens
from harness.verb_parser import Boolean, VerbParser, name_or_path, number, whole_number

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
    tokenizer, model = load(args.model)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    chat = brings_template(tokenizer) if args.chat is None else args.chat
    ids = prompt_ids(tokenizer, prompt, chat=chat)
    if chat:  # a base model's config may name another token than the one with which the template ends an answer
        model.generation_config = with_stop_tokens(model.generation_config, stop_tokens(tokenizer))
    made = _continued(model, ids, padding_id(tokenizer), args)
    print(tokenizer.decode(made[len(ids) :] if chat else made, skip_special_tokens=True))
    return 0


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
