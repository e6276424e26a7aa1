"""Tokenise the prompts of `--sample_prompts`, which the model continues at each evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.arguments import TrainingArguments
from harness.data.continuation import continued
from harness.data.inputs.early_checks import read_prompts
from harness.data.templates import Template
from harness.data.tokenizer import ByteTokenizer, SpecialTokens, Tokenizer, encode, known
from harness.errors import UserError
from harness.hf.skeleton import ModelSource, position_limit
from harness.training.engine.engine import Engine
from harness.training.parts.data import Datasets
from harness.wording import counted


@dataclass(frozen=True, kw_only=True)
class TokenisedPrompts:
    """The prompts as token ids.

    Attributes:
        texts: the prompts for reports.
        ids: the token ids of each prompt.
        most: largest number of tokens of a continuation.
        length: number of tokens of the longest prompt with its continuation.
        end: the id that ends a continuation, or None.
        decode: converts ids to text.
    """

    texts: list[str]
    ids: list[list[int]]
    most: int
    length: int
    end: int | None
    decode: Callable[[list[int]], str]

    def continued(self, engine: Engine) -> list[str]:
        """Return the model's continuation of each prompt; all ranks call it and get the same result."""
        return [self.decode(made) for made in continued(engine, self.ids, self.most, self.length, self.end)]


def sample_prompts(args: TrainingArguments, data: Datasets, source: ModelSource, vocabulary: int) -> TokenisedPrompts:
    """Return the prompts of `--sample_prompts` for a model with `vocabulary` ids.

    Raises UserError if the model cannot take them, or the run has no evaluations.
    """
    if data.tokenizer is None:
        raise UserError("--sample_prompts needs a tokenizer: give processing_class")
    if data.evaluation is None:
        raise UserError("--sample_prompts needs evaluations: set --eval_steps, or give evaluation data")
    tokenizer = known(data.tokenizer)
    file = str(args.sample_prompts)
    prompts = read_prompts(Path(file))
    ids = ids_of(tokenizer, prompts, file)
    limit = position_limit(source.config)
    for number, row in enumerate(ids, 1):
        if not row or max(row) >= vocabulary or (limit is not None and len(row) >= limit):
            size = f"{counted(len(row), 'token')}, and the model has {limit} positions and {vocabulary} ids"
            raise UserError(f"{file}: prompt {number} has {size}: correct it")
    length = max(map(len, ids)) + args.sample_tokens
    return TokenisedPrompts(
        texts=[prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False) for prompt in prompts],
        ids=ids,
        most=args.sample_tokens,
        length=min(length, limit or length),
        end=tokenizer.eos_token_id,
        decode=lambda made: str(tokenizer.decode(made)),
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
