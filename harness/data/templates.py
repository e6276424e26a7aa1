"""A tokenizer's chat template: what it writes of messages, and which of that it marks as generated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from harness.config.values.json_object import JsonObject
from harness.data.marks import words_of
from harness.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_END_OF_GENERATION = re.compile(r"\{%-?\s*endgeneration\s*-?%\}")
_MOST_CHARACTERS = 1 << 26
"""Of what a template writes: many times what a model can read."""


class Template:
    """The chat template that a tokenizer uses with or without tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None = None) -> None:
        self._source: str = tokenizer.get_chat_template(tools=tools)
        self._names: dict[str, Any] = dict(tokenizer.special_tokens_map)

    @property
    def eos(self) -> str:
        """The text of the token that ends a document, or nothing."""
        return str(self._names.get("eos_token") or "")

    @cached_property
    def words(self) -> list[str]:
        """Strings at which the template may split a message."""
        return words_of(self._source)

    @cached_property
    def marks_answers(self) -> bool:
        """Whether it marks answers with {% generation %}, where its output is written piece by piece.

        Transformers counts the characters before a mark. In a macro, or in a block whose output is kept, it cannot.
        """
        from jinja2 import Environment, nodes
        from jinja2.exceptions import TemplateError

        if not _GENERATION.search(self._source):
            return False
        plain = _GENERATION.sub("{% call generation() %}", _END_OF_GENERATION.sub("{% endcall %}", self._source))
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(plain)
        except TemplateError:
            return True  # it is rejected when it is used
        held = (nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock)
        marks = (call for block in tree.find_all(held) for call in block.find_all(nodes.CallBlock))
        return not any(isinstance(mark.call.node, nodes.Name) and mark.call.node.name == "generation" for mark in marks)

    def write(
        self, messages: Sequence[JsonObject], tools: list[Any] | None, place: str, *, prompt: bool = False
    ) -> str:
        """Return the messages as text; with `prompt`, and what makes the model answer. UserError if it cannot."""
        (text,), _ = self._rendered(messages, tools, place, add_generation_prompt=prompt)
        return str(text)

    def generated(self, messages: Sequence[JsonObject], tools: list[Any] | None, place: str) -> list[tuple[int, int]]:
        """Return the spans of the text that the template marks as generated: first character, and one after the
        last."""
        _, (spans,) = self._rendered(messages, tools, place, return_assistant_tokens_mask=True)
        return [(start, end) for start, end in spans]

    def _rendered(self, messages: Sequence[JsonObject], tools: list[Any] | None, place: str, **how: Any) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            written: Any = render_jinja_template(
                conversations=[list(messages)], tools=tools, chat_template=self._source, **how, **self._names
            )
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{place}: the chat template rejects it: {reason[:200]}") from error
        if len(written[0][0]) > _MOST_CHARACTERS:
            raise UserError(f"{place}: the chat template writes more than {_MOST_CHARACTERS:,} characters: correct it")
        return written
