"""Render messages with a tokenizer's chat template, and read the spans that it marks as generated."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from harness.config.values.json_object import JsonObject
from harness.data.marks import words_of
from harness.errors import UserError, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 1 << 26
"""Limit for the output of a template, in characters: many times what a model can read."""
MOST_SECONDS = 20
"""Limit of CPU seconds for one conversation. A usual template takes milliseconds."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BRACKETS = (r"<[^<>\s]+>", r"\[[^\[\]\s]+[\[\]]")  # as <|end|>, [/INST] and [e~[
_END_OF_GENERATION = re.compile(r"\{%-?\s*endgeneration\s*-?%\}")


class Rejected(UserError):
    """The template rejects a conversation."""


class Template:
    """The chat template that a tokenizer uses with or without tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: list[JsonObject] | None = None) -> None:
        self._source: str = tokenizer.get_chat_template(tools=tools)
        self._names: dict[str, Any] = dict(tokenizer.special_tokens_map)
        added = sorted(filter(str.strip, tokenizer.get_added_vocab()), key=len, reverse=True)
        self._token = re.compile("|".join([*map(re.escape, added), *_BRACKETS]))
        self.roles: dict[tuple[object, ...], bool] = {}
        """Whether messages of two roles are written alike, by the roles around them: found once for a data set."""

    @property
    def eos(self) -> str:
        """The text of the end-of-sequence token, or ""."""
        return str(self._names.get("eos_token") or "")

    def first_token(self, text: str) -> re.Match[str] | None:
        """Find the first token that can end a turn: one of the tokenizer's added ones, or a word in brackets."""
        return self._token.search(text)

    def tokens(self, text: str) -> Iterator[re.Match[str]]:
        """Find all such tokens."""
        return self._token.finditer(text)

    @cached_property
    def words(self) -> list[str]:
        """Strings at which the template may split a message."""
        return words_of(self._source)

    @cached_property
    def marks_answers(self) -> bool:
        """Whether it has {% generation %} marks that transformers can locate.

        Transformers counts the characters written before a mark. Inside a macro, or a block whose output is captured,
        the count starts at 0, so the positions would be wrong; such marks are ignored.
        """
        from jinja2 import Environment, nodes
        from jinja2.exceptions import TemplateError

        if not _GENERATION.search(self._source):
            return False
        plain = _GENERATION.sub("{% call generation() %}", _END_OF_GENERATION.sub("{% endcall %}", self._source))
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(plain)
        except (TemplateError, RecursionError):
            return True  # the template is rejected when it is used
        held = (nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock)
        marks = (call for block in tree.find_all(held) for call in block.find_all(nodes.CallBlock))
        return not any(isinstance(mark.call.node, nodes.Name) and mark.call.node.name == "generation" for mark in marks)

    def write(
        self, messages: Sequence[JsonObject], tools: list[JsonObject] | None, location: str, *, prompt: bool = False
    ) -> str:
        """Render messages as text, with the generation prompt if `prompt`.

        Raises Rejected, a UserError, if the template refuses these messages; UserError if it fails in another way.
        """
        (text,), _ = self._render(messages, tools, location, add_generation_prompt=prompt)
        return str(text)

    def generated(
        self, messages: Sequence[JsonObject], tools: list[JsonObject] | None, location: str
    ) -> list[tuple[int, int]]:
        """Return the spans (first character, last + 1) of the text that the template marks as generated."""
        _, (spans,) = self._render(messages, tools, location, return_assistant_tokens_mask=True)
        return [(start, end) for start, end in spans]

    def _render(
        self, messages: Sequence[JsonObject], tools: list[Any] | None, location: str, **how: Any
    ) -> tuple[list[str], list[list[tuple[int, int]]]]:
        """Return the text of one conversation and its generated spans, from transformers' sandbox."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with _limited(location):
                rendered: Any = render_jinja_template(  # its declared type is wrong
                    conversations=[list(messages)], tools=tools, chat_template=self._source, **how, **self._names
                )
        except UserError:
            raise
        except Exception as error:  # a template is somebody else's program, and may raise anything
            raise Rejected(f"{location}: the chat template rejects it: {text_of(error, 200)}") from error
        texts, spans = rendered
        if len(texts[0]) > MOST_CHARACTERS:
            raise UserError(
                f"{location}: the chat template writes more than {MOST_CHARACTERS:,} characters: correct it"
            )
        return texts, spans


@contextmanager
def _limited(location: str) -> Iterator[None]:
    """Raise UserError if this block computes for more than MOST_SECONDS. Only in the main thread, as signals need it.

    The timer counts time of the processor: a process that was stopped, as by Ctrl-Z, has used none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise UserError(f"{location}: the chat template does not end within {MOST_SECONDS} s: correct it")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
