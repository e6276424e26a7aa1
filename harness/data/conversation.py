"""A conversation as a chat template writes it: whole, in part, and with marks in its strings.

A template does not say in which form it takes messages, so a conversation is tried in each form that servers use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from harness.config.values.json_object import JsonObject
from harness.data.marks import FoundMark, MarkedMessages, holds_marks, mark
from harness.data.rows.kinds import ASSISTANT, THOUGHTS
from harness.data.rows.tools import with_unique_names
from harness.data.templates import Rejected, Template

Span: TypeAlias = tuple[int, int]
"""Index of the first character, and of the one after the last."""


class Unusable(Exception):
    """One form of the conversation cannot be trained on. The message continues the location."""


@dataclass(frozen=True)
class Conversation:
    """One form of a conversation, which is rendered whole, in part, and with marks."""

    template: Template
    messages: list[JsonObject]
    tools: list[JsonObject] | None
    location: str

    def write(self) -> str:
        """Return the whole conversation as the template writes it. Raises Unusable if it rejects the conversation."""
        try:
            return self.template.write(self.messages, self.tools, self.location)
        except Rejected as error:
            raise Unusable(str(error).removeprefix(self.location)) from error

    def render(
        self, messages: Sequence[JsonObject], *, prompt: bool = False, tools: Sequence[JsonObject] | None = None
    ) -> str | None:
        """Return messages as the template writes them, with the generation prompt if asked; None if it rejects them.

        `tools` replaces the conversation's own; [] leaves them out.
        """
        given = self.tools if tools is None else [*tools] or None
        try:
            return self.template.write(messages, given, self.location, prompt=prompt)
        except Rejected:
            return None

    def said(self, role: str, text: str) -> JsonObject:
        """Return a message in this form."""
        in_parts = any(isinstance(message.get("content"), list) for message in self.messages)
        return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}

    def marked(self, text: str) -> Marked | None:
        """Render with marks in the strings; None if the marks change anything else in the output, `text`."""
        # If the conversation itself contains such characters, they cannot be told from marks.
        if any(holds_marks(json.dumps(given, ensure_ascii=False)) for given in (text, self.messages, self.tools)):
            return None
        # A template may parse a question, or test how a string begins or ends: so also try marks in answers alone, and
        # marks inside words.
        for answers_alone, inside in ((False, False), (True, False), (False, True), (True, True)):
            form = mark(self.messages, self.template.words, answers_alone=answers_alone, inside=inside)
            written = self.render(form.messages)
            if written is not None and all(form.has(index) for index in self._answers_with_text()):
                without, placed = form.read(written)
                if without == text:
                    return Marked(form, text, placed)
        return None

    def _answers_with_text(self) -> Iterator[int]:
        """Yield the indices of answers whose content is not blank."""
        for index, message in enumerate(self.messages):
            content = message.get("content")
            texts = [content] if isinstance(content, str) else [part["text"] for part in content or []]
            if message["role"] == ASSISTANT and "".join(texts).strip():
                yield index


@dataclass(frozen=True)
class Marked:
    """A rendered conversation, and the positions of the marks of its strings in it."""

    form: MarkedMessages
    text: str
    placed: list[FoundMark]

    def of(self, index: int) -> list[FoundMark]:
        """Return the marks of a message up to the first repeated one: a tool's answer may repeat the call's name."""
        own = [found for found in self.placed if found.mark.message == index]
        seen = [found.character for found in own]
        return own[: next((i for i, each in enumerate(seen) if each in seen[:i]), len(own))]

    def owners(self, span: Span) -> set[int]:
        """Return the messages whose text lies in a span; raise Unusable if the span begins or ends inside a text."""
        for one, other in pairwise(self.placed):
            if one.mark.begins and not other.mark.begins and any(one.at < edge < other.at for edge in span):
                raise Unusable(f", message {one.mark.message + 1}: {{% generation %}} marks a part of this text")
        return {found.mark.message for found in self.inside(span)}

    def inside(self, span: Span) -> Iterator[FoundMark]:
        """Yield the marks whose strings touch a span."""
        start, end = span
        for found in self.placed:
            if start <= found.at < end if found.mark.begins else start < found.at <= end:
                yield found


def forms(messages: list[JsonObject]) -> Iterator[list[JsonObject]]:
    """Yield the messages in each form that a known template expects; a template does not declare its form.

    The arguments of a tool call are an object or a JSON text; empty content beside tool calls is absent, "" or null;
    content is a text or a list of parts; thoughts stand under one name or another.
    """
    for named in _with_thoughts(messages):
        silent = [bool(message.get("tool_calls")) and not message.get("content") for message in named]
        as_objects = [{**message, **_with_arguments(message, as_text=False)} for message in named]
        as_texts = [{**message, **_with_arguments(message, as_text=True)} for message in named]
        for form in (as_objects, as_texts) if as_texts != as_objects else (as_objects,):
            yield form
            for content in ("", None) if any(silent) else ():
                yield [
                    {**message, "content": content} if is_silent else message
                    for message, is_silent in zip(form, silent, strict=True)
                ]
        yield [
            {**message, "content": [{"type": "text", "text": message.get("content") or ""}]} for message in as_objects
        ]


def _with_thoughts(messages: list[JsonObject]) -> Iterator[list[JsonObject]]:
    """Yield the messages with thoughts under the given names, then under each of the names that templates read."""
    yield messages
    used = [[name for name in THOUGHTS if name in message] for message in messages]
    for chosen in THOUGHTS if any(used) and all(len(names) < 2 for names in used) else ():
        if any(names not in ([], [chosen]) for names in used):
            yield [{chosen if name in THOUGHTS else name: message[name] for name in message} for message in messages]


def _with_arguments(message: JsonObject, *, as_text: bool) -> JsonObject:
    """Return the tool calls of a message with their arguments as JSON text, or parsed into objects where possible."""

    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        if "arguments" not in call:
            return call
        return {**call, "arguments": _as_text(call["arguments"]) if as_text else _as_object(call["arguments"])}

    calls = message.get("tool_calls")
    return {"tool_calls": [changed(call) for call in calls]} if isinstance(calls, list) else {}


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments, object_pairs_hook=with_unique_names)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
