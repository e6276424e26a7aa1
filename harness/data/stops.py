"""The tokens with which a model ends its answers by the chat template, and generation that stops at them.

The tokenizer's end-of-sequence token is often another one: a base model with a ChatML template ends documents with
`<|endoftext|>` and answers with `<|im_end|>`. A template that closes no turn has the next turn's token end the answer:
`<|user|>`, or `<|observation|>` behind a tool call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.config.values.json_object import JsonObject
from harness.data.answers import find_answers
from harness.data.templates import Template
from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

_QUESTION: JsonObject = {"role": "user", "content": "Which word?"}
_WORD: JsonObject = {"type": "string", "description": "The word."}
_FUNCTION: JsonObject = {"name": "find", "description": "Find a word.", "parameters": {"type": "object"}}
_TOOLS = [
    {"type": "function", "function": {**_FUNCTION, "parameters": {"type": "object", "properties": {"word": _WORD}}}}
]
_CALL: JsonObject = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "find", "arguments": {"word": "Answered"}},
}
_ANSWERS: tuple[tuple[JsonObject, list[JsonObject] | None], ...] = (
    ({"role": "assistant", "content": "Answered"}, None),
    ({"role": "assistant", "tool_calls": [_CALL]}, _TOOLS),
)


@dataclass(frozen=True)
class StopToken:
    """The text that ends an answer, and its id; None if the tokenizer cuts the text into several tokens."""

    text: str
    id: int | None


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> list[StopToken]:
    """Return the tokens that end an answer and a tool call; [] without a template, or if no answer can be trained."""
    if not tokenizer.chat_template or not tokenizer.is_fast:
        return []
    texts = dict.fromkeys(text for answer, tools in _ANSWERS for text in _ends(tokenizer, answer, tools))
    return [StopToken(text, _id(tokenizer, text)) for text in texts]


def _ends(tokenizer: PreTrainedTokenizerBase, answer: JsonObject, tools: list[JsonObject] | None) -> Iterator[str]:
    """Yield the last token of an answer as it is trained on, with thoughts if the template asks for them."""
    template = Template(tokenizer, tools)
    for message in (answer, {**answer, "reasoning_content": "Thought"}):
        try:
            found = find_answers(template, [_QUESTION, message], tools, {1}, "the chat template")
        except UserError:
            continue
        *_, last = template.tokens(found.text[slice(*found.spans[-1])])
        yield last[0]
        return


def _id(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return int(ids[0]) if len(ids) == 1 else None


def with_stop_tokens(generation: GenerationConfig, stops: Sequence[StopToken]) -> GenerationConfig:
    """Return a copy of a generation config that also stops at these tokens."""
    changed = copy.deepcopy(generation)
    given = listed(generation.eos_token_id)
    ids = list(dict.fromkeys([*given, *(stop.id for stop in stops if stop.id is not None)]))
    if ids != given:
        changed.eos_token_id = ids[0] if len(ids) == 1 else ids
    return changed


def listed(ids: int | list[int] | None) -> list[int]:
    """Return the ids in a field of a generation config, which holds one, several or none."""
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]
