"""Tokenise the prompts of `--sample_prompts`, which the model continues at each evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.data.inputs.early_checks import read_prompts
from harness.data.templates import Template
from harness.data.tokenizer import ByteTokenizer, SpecialTokens, Tokenizer, encode
from harness.errors import UserError
from harness.hf.skeleton import position_limit
from harness.training.prepare.plan import RunPlan
from harness.training.prepare.trainable import TrainableModel
from harness.wording import counted


@dataclass(frozen=True, kw_only=True)
class SamplePrompts:
    """Prompts to continue.

    Attributes:
        texts: the prompts as they are reported.
        ids: the token ids of each prompt.
        most: largest number of tokens of a continuation.
        length: tokens of the longest prompt with its continuation.
        tokenizer: decodes the continuations.
    """

    texts: list[str]
    ids: list[list[int]]
    most: int
    length: int
    tokenizer: Tokenizer

    def text(self, ids: list[int]) -> str:
        """Return the text of a continuation."""
        return str(self.tokenizer.decode(ids))


def sample_prompts(plan: RunPlan, trainable: TrainableModel) -> SamplePrompts | None:
    """Return the prompts, None without any. UserError if the model cannot take them, or the run has no evaluations."""
    args = plan.args
    if args.sample_prompts is None:
        return None
    tokenizer, causal = plan.data.tokenizer, trainable.causal
    assert causal is not None  # refused for a list of layers
    if tokenizer is None:
        raise UserError("--sample_prompts needs a tokenizer: give processing_class")
    if plan.data.evaluation is None:
        raise UserError("--sample_prompts needs evaluations: set --eval_steps, or give evaluation data")
    prompts = read_prompts(Path(args.sample_prompts))
    ids = ids_of(tokenizer, prompts, args.sample_prompts)
    limit = position_limit(causal.source.config)
    for number, row in enumerate(ids, 1):
        if not row or max(row) >= causal.vocab_size or (limit is not None and len(row) >= limit):
            size = f"{counted(len(row), 'token')}, and the model has {limit} positions and {causal.vocab_size} ids"
            raise UserError(f"{args.sample_prompts}: prompt {number} has {size}: correct it")
    length = max(map(len, ids)) + args.sample_tokens
    texts = [prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False) for prompt in prompts]
    return SamplePrompts(
        texts=texts, ids=ids, most=args.sample_tokens, length=min(length, limit or length), tokenizer=tokenizer
    )


def ids_of(tokenizer: Tokenizer, prompts: Sequence[Any], file: str) -> list[list[int]]:
    """Return the tokens of each prompt as a server makes them: of a text, or of messages in the chat template."""
    templated: Any = tokenizer.as_transformers() if isinstance(tokenizer, ByteTokenizer) else tokenizer
    if not all(isinstance(prompt, str) for prompt in prompts) and not templated.chat_template:
        raise UserError("--sample_prompts has messages, but the tokenizer has no chat template: give prompts as text")
    template = Template(templated) if templated.chat_template else None
    special = SpecialTokens.of(tokenizer)
    found: list[list[int]] = []
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, str) or template is None:
            found.append(special.around(encode(tokenizer, [prompt])[0].tolist()))
        else:
            text = template.write(prompt, None, f"{file}: prompt {number}", prompt=True)
            found.append(templated(text, add_special_tokens=False)["input_ids"])
    return found
