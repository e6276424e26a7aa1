"""Which tokens end an answer by a chat template, and generation that stops at them."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerBase

from harness.data.stops import StopToken, stop_tokens, with_stop_tokens
from harness.data.tokenizer import ByteTokenizer
from tests.unit.data.test_chat_templates import TEMPLATES


def tokenizer_of(template: str, *tokens: str) -> PreTrainedTokenizerBase:
    tokenizer = ByteTokenizer().as_transformers()
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("chatml", ["<|im_end|>"]),
        ("calls_of_hermes", ["<|im_end|>"]),
        ("channels", ["<|return|>", "<|call|>"]),
        ("nothing_closes", ["<|user|>", "<|observation|>"]),
        ("end_of_text_behind_all", ["<|end|>"]),
        ("names_of_speakers", []),
    ],
)
def test_the_tokens_that_end_answers_and_calls_are_found(name: str, texts: list[str]) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name], *texts)
    found = stop_tokens(tokenizer)
    assert found == [StopToken(text, tokenizer.convert_tokens_to_ids(text)) for text in texts]


def test_a_text_that_is_no_token_has_no_id() -> None:
    assert stop_tokens(tokenizer_of(TEMPLATES["chatml"])) == [StopToken("<|im_end|>", None)]


@pytest.mark.parametrize(
    ("known", "ids", "wanted"), [(None, [7], 7), (2, [7], [2, 7]), ([2, 7], [7], [2, 7]), (2, [None], 2), (2, [2], 2)]
)
def test_generation_also_stops_at_them(known: object, ids: list[int | None], wanted: object) -> None:
    given = GenerationConfig(eos_token_id=known)
    assert with_stop_tokens(given, [StopToken("<end>", each) for each in ids]).eos_token_id == wanted
    assert given.eos_token_id == known
