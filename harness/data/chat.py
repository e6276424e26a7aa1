"""Tokenise conversations, and mark the tokens of the answers that are trained on.

The tokenizer's chat template renders a conversation as text, and `answers.py` finds the characters of its answers. The
tokenizer's character offsets map them to tokens, so no token boundary has to be guessed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.data.answers import find_answers
from harness.data.conversation import Span
from harness.data.rows.kinds import ASSISTANT
from harness.data.templates import Template
from harness.data.tokenizer import ByteTokenizer, SpecialTokens, Tokenizer, end_of_document_id
from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import BatchEncoding


@dataclass(frozen=True)
class Encoded:
    """A tokenised conversation: ids [tokens], and for each whether it is part of an answer to train on."""

    ids: npt.NDArray[np.int64]
    answers: npt.NDArray[np.bool_]

    def cut(self, size: int) -> Encoded | None:
        """Return the first `size` tokens; None if no answer is left in them to train on."""
        kept = Encoded(self.ids[:size], self.answers[:size])
        return kept if kept.answers[1:].any() else None  # the first token is never predicted


class ConversationEncoder:
    """Tokenises conversations in the JSON form of `rows/kinds.py`.

    Raises UserError, at the first conversation that needs it, if the tokenizer has no chat template or gives no
    character offsets.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.end = end_of_document_id(tokenizer)
        self.tokenizer = tokenizer.as_transformers() if isinstance(tokenizer, ByteTokenizer) else tokenizer
        self._special = SpecialTokens.of(self.tokenizer)
        self._templates: dict[bool, Template] = {}

    def __call__(self, conversation: str, location: str) -> Encoded:
        """Tokenise a conversation in JSON. UserError naming its location if the template cannot render it."""
        parsed = json.loads(conversation)
        if "messages" not in parsed:
            return self._completion(parsed["prompt"], parsed["completion"])
        self._require_template()
        messages = parsed["messages"]
        tools = parsed.get("tools")
        unlearnt = {*range(parsed["answers_from"]), *parsed.get("unlearnt", ())}
        learnt = {i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i not in unlearnt}
        if bool(tools) not in self._templates:  # a tokenizer may have another template for tools
            self._templates[bool(tools)] = Template(self.tokenizer, tools)
        template = self._templates[bool(tools)]
        found = find_answers(template, messages, tools, learnt, location)
        return self._encode(found.text, found.spans, location)

    @property
    def template(self) -> str:
        """The chat template and the special tokens as JSON: they decide how a conversation is rendered (cache key)."""
        return json.dumps([self.tokenizer.chat_template, self.tokenizer.special_tokens_map], default=str)

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
        """Tokenise a prompt as a server does, and what continues it; the end-of-document token is learnt too."""
        asked = self._special.around(self._ids(prompt)["input_ids"])
        answered = self._continuation(prompt, completion)
        end = [] if answered[-1:] == [self.end] else [self.end]
        ids = np.asarray([*asked, *answered, *end], dtype=np.int64)
        return Encoded(ids=ids, answers=np.arange(len(ids)) >= len(asked))

    def _continuation(self, prompt: str, completion: str) -> list[int]:
        """Return the ids of a completion behind its prompt, whose own ids stay as a server has them.

        A tokenizer may put a space before a text, so the completion is tokenised behind another text: the prompt or, if
        both share a token, some character.
        """
        for before in (prompt, prompt[-1:], *"\na0."):
            ids, both = (list[int](self._ids(text)["input_ids"]) for text in (before, before + completion))
            if both[: len(ids)] == ids:
                return both[len(ids) :]
        alone: list[int] = self._ids(completion)["input_ids"]
        return alone

    def _encode(self, text: str, spans: Sequence[Span], location: str) -> Encoded:
        tokens = self._ids(text, return_offsets_mapping=True)
        starts, ends = np.asarray(tokens["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        answers = np.zeros(len(starts), dtype=bool)
        for start, end in spans:
            answers |= (ends > start) & (starts < end)
        if not answers.any():
            raise UserError(f"{location}: the chat template writes no answer to train on")
        return Encoded(ids=np.asarray(tokens["input_ids"], dtype=np.int64), answers=answers)

    def _ids(self, text: str, **more: bool) -> BatchEncoding:
        """Tokenise a text without adding special tokens: the template has written them."""
        encoded: BatchEncoding = self.tokenizer(
            text,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # longer than the model's context: it is cut afterwards
            **more,
        )
        return encoded
