"""A tokenizer's chat template: what it writes of messages, and which of that it marks as generated.

A template is a program of somebody else. What it does is bounded: it is tried on the first conversation in a process of
its own, with little time and memory, before it is used here.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Sequence
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
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


_MOST_BYTES = 1 << 30
_MOST_SECONDS = 20
"""Of computing, for one conversation. A usual template takes milliseconds."""
_PATIENCE_S = 120.0
_NO_MEMORY = 3


class Template:
    """The chat template that a tokenizer uses with or without tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None = None) -> None:
        self._source: str = tokenizer.get_chat_template(tools=tools)
        self._names: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._is_tried = False

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
        if not self._is_tried:
            self._try(messages, tools, place)
        try:
            written = self._written(messages, tools, **how)
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{place}: the chat template rejects it: {reason[:200]}") from error
        if len(written[0][0]) > _MOST_CHARACTERS:
            raise UserError(f"{place}: the chat template writes more than {_MOST_CHARACTERS:,} characters: correct it")
        return written

    def _written(self, messages: Sequence[JsonObject], tools: list[Any] | None, **how: Any) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        conversations = [list(messages)]
        return render_jinja_template(
            conversations=conversations, tools=tools, chat_template=self._source, **how, **self._names
        )

    def _try(self, messages: Sequence[JsonObject], tools: list[Any] | None, place: str) -> None:
        """Write a conversation in a process that ends where it takes too much; UserError if it does.

        Nothing within this process could stop Python while it multiplies a text or raises a number to a power.
        """
        from transformers.utils import chat_template_utils as _  # noqa: F401  # so that the process need not import it

        trial = get_context("fork").Process(target=self._write_bounded, args=(messages, tools))
        trial.start()
        trial.join(_PATIENCE_S)
        if trial.is_alive():
            trial.kill()
            trial.join()
        if trial.exitcode == _NO_MEMORY:
            raise UserError(f"{place}: the chat template takes more than 1 GiB of memory for this: correct it")
        if trial.exitcode != 0:
            raise UserError(f"{place}: the chat template does not end within {_MOST_SECONDS} s: correct it")
        self._is_tried = True

    def _write_bounded(self, messages: Sequence[JsonObject], tools: list[Any] | None) -> None:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
        code = 0
        try:
            self._written(messages, tools)
        except MemoryError:
            code = _NO_MEMORY
        except Exception:  # said when the template is used
            pass
        os._exit(code)
