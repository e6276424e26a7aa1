"""Conversations -> token ids, and which of them are answers to be learnt.

The tokenizer's chat template writes a conversation as text. What of it is an answer stands in the template itself
({% generation %}), or is found by rendering parts of the conversation: an answer begins where the prompt before
it ends, and ends with what closes its turn. Spans of characters become ids by the tokenizer's offsets,
so no boundary of a token has to be guessed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from harness.config.values.json_object import JsonObject
from harness.data.files.rows import ASSISTANT
from harness.data.tokenizer import ByteTokenizer, Tokenizer, end_of_document_id
from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

Span: TypeAlias = tuple[int, int]
"""First character and the one after the last."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoded:
    """A conversation's ids, and which of them are to be learnt."""

    ids: npt.NDArray[np.int64]
    answers: npt.NDArray[np.bool_]


class ConversationEncoder:
    """Encodes conversations as `rows.py` makes them, with one tokenizer.

    Raises UserError, at the first conversation that needs it, if the tokenizer has no chat template or cannot tell
    which characters a token stands for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.end = end_of_document_id(tokenizer)
        self.tokenizer = tokenizer.as_transformers() if isinstance(tokenizer, ByteTokenizer) else tokenizer

    def __call__(self, conversation: str, place: str) -> Encoded:
        """Encode a conversation in JSON; UserError, with its place, if the template does not serve it."""
        parsed = json.loads(conversation)
        if "messages" not in parsed:
            return self._completion(parsed["prompt"], parsed["completion"])
        self._require_template()
        render = _Renderer(self.tokenizer, parsed["messages"], parsed.get("tools"), place)
        text, spans = render.generated() if self._marks_answers else render.found()
        return self._encode(text, render.behind(parsed["answers_from"], text, spans), place)

    @property
    def template(self) -> str:
        """The chat template with what it may ask the tokenizer for: all that decides how a conversation is written."""
        return json.dumps([self.tokenizer.chat_template, self.tokenizer.special_tokens_map], default=str)

    @cached_property
    def _marks_answers(self) -> bool:
        return bool(_GENERATION.search(self.tokenizer.get_chat_template()))

    def _require_template(self) -> None:
        name = os.fspath(getattr(self.tokenizer, "name_or_path", "")) or type(self.tokenizer).__name__
        if not self.tokenizer.chat_template:
            raise UserError(
                f"the tokenizer {name} has no chat template for `messages`: "
                "add a chat_template.jinja to its directory, or give a --tokenizer_name that has one"
            )
        if not self.tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {name} gives no character offsets, so answers cannot be "
                "located: give one with a tokenizer.json"
            )

    def _completion(self, prompt: str, completion: str) -> Encoded:
        """Prompt and completion apart, as they are when the model is asked; the end of the document is learnt."""
        asked, answered = (self._ids(text)["input_ids"] for text in (prompt, completion))
        ids = np.asarray([*asked, *answered, self.end], dtype=np.int64)
        return Encoded(ids=ids, answers=np.arange(len(ids)) >= len(asked))

    def _encode(self, text: str, spans: Sequence[Span], place: str) -> Encoded:
        tokens = self._ids(text, return_offsets_mapping=True)
        starts, ends = np.asarray(tokens["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        answers = np.zeros(len(starts), dtype=bool)
        for start, end in spans:
            answers |= (ends > start) & (starts < end)
        if not answers.any():
            raise UserError(f"{place}: the chat template writes no answer to learn")
        return Encoded(ids=np.asarray(tokens["input_ids"], dtype=np.int64), answers=answers)

    def _ids(self, text: str, **more: bool) -> BatchEncoding:
        """Return the text's ids, without special tokens but those that the template has written."""
        encoded: BatchEncoding = self.tokenizer(
            text,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # longer than the model's context: it is cut afterwards
            **more,
        )
        return encoded


@dataclass(frozen=True)
class _Renderer:
    """Writes a conversation, or the beginning of it, by the template, and finds the answers in what it has written."""

    tokenizer: PreTrainedTokenizerBase
    messages: list[JsonObject]
    tools: list[Any] | None
    place: str

    def text(self, count: int | None = None, prompt: bool = False) -> str:
        """Return the first `count` messages; with `prompt`, and what makes the model answer."""
        try:
            text = self.tokenizer.apply_chat_template(
                self.messages[:count], tools=self.tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template may raise anything
            raise self._refused(error) from error
        return str(text)

    def generated(self) -> tuple[str, list[Span]]:
        """Return the conversation and the spans that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        named: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        try:
            written: Any = render_jinja_template(
                conversations=[self.messages],
                tools=self.tools,
                chat_template=self.tokenizer.get_chat_template(tools=self.tools),
                return_assistant_tokens_mask=True,
                **named,
            )
        except Exception as error:
            raise self._refused(error) from error
        (text,), (spans,) = written
        return text, spans

    def found(self) -> tuple[str, list[Span]]:
        """Return the conversation and the spans of its answers, found by rendering its beginnings."""
        text = self.text()
        spans: list[Span] = []
        for index, message in enumerate(self.messages):
            if message["role"] == ASSISTANT:
                spans.append(self._find(text, index, spans[-1][1] if spans else 0))
        return text, spans

    def behind(self, count: int, text: str, spans: list[Span]) -> list[Span]:
        """Return the spans that lie behind the first `count` messages, which are not learnt."""
        places = [index for index, message in enumerate(self.messages) if message["role"] == ASSISTANT]
        if len(places) == len(spans):
            return [span for index, span in zip(places, spans, strict=True) if index >= count]
        prompt_end = _common(text, self.text(count, prompt=True)) if count else 0
        return [span for span in spans if span[1] > prompt_end]

    def _find(self, text: str, index: int, after: int) -> Span:
        """Return the span of the answer at `index`, behind the previous one: what was said, and what closes the
        turn."""
        up_to = self.text(index + 1)
        begin = self._begin(text, index, after)
        said = str(self.messages[index].get("content", "")).strip()
        if begin is not None and text.startswith(up_to):
            return begin, begin + len(_without_line_break(text[begin : len(up_to)], said))
        # An answer may be written differently once more follows it, its thoughts left out: then what was said is
        # looked for together with what closes the turn when it is the last one.
        before, found, closing = up_to.rpartition(said)
        closing = _without_line_break(said + closing, said)[len(said) :]
        for start in _occurrences(text, said + closing, after) if said and found and before else ():
            return (start if begin is None or begin > start else begin), start + len(said + closing)
        raise UserError(
            f"{self.place}, message {index + 1}: this answer cannot be found in the output of the chat "
            "template: mark the answers in the template with {% generation %}"
        )

    def _begin(self, text: str, index: int, after: int) -> int | None:
        """Where the model would begin to answer at `index`; None if that is not known."""
        asked = self.text(index) if index else ""
        if not text.startswith(asked):
            return None
        begin = _common(text, self.text(index, prompt=True)) if index else None
        return begin if begin is not None and begin >= max(after, len(asked)) else None

    def _refused(self, error: Exception) -> UserError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return UserError(f"{self.place}: the chat template rejects it: {reason[:200]}")


def _without_line_break(answer: str, said: str) -> str:
    """Return an answer without the space behind what closes its turn: a model stops before it writes that.

    Where space is all that closes the turn it stays.
    """
    kept = answer.rstrip()
    return answer if kept.endswith(said or answer) else kept


def _common(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    if a.startswith(b):
        return len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _occurrences(text: str, part: str, start: int) -> Iterator[int]:
    while (start := text.find(part, start)) >= 0:
        yield start
        start += 1
