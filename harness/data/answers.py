"""Find the characters of a rendered conversation that are the assistant's answers: only they are trained on.

If the template marks answers with {% generation %}, those marks decide. Otherwise an answer begins where its
generation prompt ends, and ends after the token that closes its turn. Both ends are found by rendering the first few
messages alone, with and without the generation prompt. A template may render a turn differently when more messages
follow (without its thoughts, for example). Therefore such a rendering is aligned with the whole conversation at marks
(`marks.py`), never by searching for the text of the answer. An answer that cannot be located for certain is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

from harness.config.values.json_object import JsonObject
from harness.data.files.rows import ASSISTANT
from harness.data.files.tools import with_unique_names
from harness.data.marks import CALLS, FoundMark, MarkedMessages, holds_marks, mark
from harness.data.templates import Template
from harness.errors import UserError
from harness.hf.template_process import Rejected

Span: TypeAlias = tuple[int, int]
"""Index of the first character, and of the one after the last."""

# A question to render alone or after a conversation: it shows what the template writes around messages.
_PROBE: JsonObject = {"role": "user", "content": "?"}
# Special tokens look like <|end|> or [INST]. _OPEN: one whose bracket is not closed before the text ends.
_OPEN = re.compile(r"(<[^<>]*|\[[^\[\]]*)\Z")
_CLOSED = re.compile(r".*[>\]}]", re.DOTALL)
_TOKEN = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_OPENINGS = re.compile(rf"(?:\s*(?:{_TOKEN.pattern}))+")
_FIRST_CLOSED = re.compile(r".*?[>\]}]", re.DOTALL)


class _NotFound(Exception):
    """The answers cannot be located in one form of the conversation. Its message continues the location."""


@dataclass(frozen=True)
class Answers:
    """A rendered conversation, and the spans of it that are trained on, in order."""

    text: str
    spans: list[Span]


def find_answers(
    template: Template, messages: list[JsonObject], tools: list[Any] | None, learnt: Set[int], location: str
) -> Answers:
    """Render a conversation and locate the messages to train on.

    Args:
        learnt: indices of these messages.
        location: where the conversation stands (file and line), for errors.

    Raises:
        UserError: the template rejects the conversation, or an answer cannot be located.
    """
    reasons: list[str] = []
    for form in _forms(messages):
        try:
            return _Conversation(template, form, tools, location).answers(learnt)
        except _NotFound as error:
            reasons.append(str(error))
    raise UserError(location + next((reason for reason in reasons if "rejects it" not in reason), reasons[0]))


def _forms(messages: list[JsonObject]) -> Iterator[list[JsonObject]]:
    """Yield the messages in each form that a known template expects; a template does not declare its form.

    The arguments of a tool call are an object or a JSON text; empty content beside tool calls is absent, "" or null;
    content is a text or a list of parts.
    """
    silent = [bool(message.get("tool_calls")) and not message.get("content") for message in messages]
    as_objects = [{**message, **_with_arguments(message, as_text=False)} for message in messages]
    as_texts = [{**message, **_with_arguments(message, as_text=True)} for message in messages]
    for form in (as_objects, as_texts) if as_texts != as_objects else (as_objects,):
        yield form
        for content in ("", None) if any(silent) else ():
            yield [
                {**message, "content": content} if is_silent else message
                for message, is_silent in zip(form, silent, strict=True)
            ]
    yield [{**message, "content": [{"type": "text", "text": message.get("content") or ""}]} for message in as_objects]


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


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments, object_pairs_hook=with_unique_names)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


@dataclass(frozen=True)
class _Conversation:
    """One form of a conversation, which is rendered whole, in part, and with marks."""

    template: Template
    messages: list[JsonObject]
    tools: list[Any] | None
    location: str

    def answers(self, learnt: Set[int]) -> Answers:
        """Return the rendered conversation and the spans of the messages `learnt`; raise _NotFound if unsure."""
        try:
            text = self.template.write(self.messages, self.tools, self.location)
        except Rejected as error:
            raise _NotFound(str(error).removeprefix(self.location)) from error
        if self.tools and text == self.render(self.messages, tools=False):
            raise _NotFound(": the chat template does not write `tools`: remove them, or use a template that has them")
        marked = self._marked(text)
        if marked is not None:
            marked.require_tool_calls()
        if self.template.marks_answers:
            return Answers(text, self._generated(marked, learnt))
        spans = [self._span(text, index, marked) for index in sorted(learnt)]
        if any(start < end for (_, end), (start, _) in pairwise(spans)):
            raise _NotFound(": the chat template does not write the answers one after the other")
        return Answers(text, [span for span in spans if span[0] < span[1]])

    def render(self, messages: Sequence[JsonObject], *, prompt: bool = False, tools: bool = True) -> str | None:
        """Return messages as the template writes them, with the generation prompt if asked; None if it rejects them."""
        try:
            return self.template.write(messages, self.tools if tools else None, self.location, prompt=prompt)
        except Rejected:
            return None

    @cached_property
    def header(self) -> str:
        """The generation prompt after a question; empty if the template always or never writes one."""
        question, asked = self.render([_PROBE]), self.render([_PROBE], prompt=True)
        return _without_prefix(asked, question)

    @cached_property
    def around_question(self) -> tuple[str, str]:
        """The template's text before and after the question that begins a conversation."""
        form = mark([_PROBE], (), answers_alone=False, inside=False)
        text, placed = form.read(self.render(form.messages) or "")
        return (text[: placed[0].at], text[placed[-1].at :]) if placed else ("", "")

    @cached_property
    def openings(self) -> list[str]:
        """The special tokens that a conversation begins with: they open turns and never close one."""
        found = _OPENINGS.match(self.around_question[0])
        tokens = _TOKEN.findall(found[0]) if found else []
        return [token for token in tokens if token != self.template.eos]

    def not_found(self, index: int) -> _NotFound:
        """Return the error for the answer at `index`."""
        return _NotFound(
            f", message {index + 1}: this answer cannot be found in the output of the chat template: "
            "mark the answers in the template with {% generation %}"
        )

    def _marked(self, text: str) -> _Marked | None:
        """Render the conversation with marks in its strings; None if the marks change anything else in the output."""
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
                    return _Marked(self, form, text, placed)
        return None

    def _answers_with_text(self) -> Iterator[int]:
        """Yield the indices of answers whose content is not blank."""
        for index, message in enumerate(self.messages):
            content = message.get("content")
            texts = [content] if isinstance(content, str) else [part["text"] for part in content or []]
            if message["role"] == ASSISTANT and "".join(texts).strip():
                yield index

    def _span(self, text: str, index: int, marked: _Marked | None) -> Span:
        """Return the span of the answer at `index`."""
        if marked is None:
            raise self.not_found(index)
        own = marked.of(index)
        if not own and marked.form.has(index):
            raise self.not_found(index)
        span = marked.span(index) if own else self._between_beginnings(text, index)
        marked.require_apart(span, index)
        return span

    def _between_beginnings(self, text: str, index: int) -> Span:
        """Return the span between the generation prompt and the end of the turn; both must be prefixes of the whole."""
        asked = self.render(self.messages[:index], prompt=True)
        up_to = text if index + 1 == len(self.messages) else self.render(self.messages[: index + 1])
        if asked is None or up_to is None or not (text.startswith(up_to) and up_to.startswith(asked)):
            raise self.not_found(index)
        return len(asked), max(len(asked), len(up_to.rstrip()))

    def _generated(self, marked: _Marked | None, learnt: Set[int]) -> list[Span]:
        """Return the {% generation %} spans that belong to the messages `learnt`."""
        spans = self.template.generated(self.messages, self.tools, self.location)
        answers = {index for index, message in enumerate(self.messages) if message["role"] == ASSISTANT}
        if marked is None:
            raise self.not_found(min(answers))
        for index in learnt:
            if marked.form.has(index) and not marked.of(index):
                raise self.not_found(index)
        kept = []
        for span in spans:
            owners = marked.owners(span)
            if not owners <= answers or (not owners and not answers <= learnt) or (owners & learnt and owners - learnt):
                raise _NotFound(": {% generation %} of the chat template does not stand around single answers")
            if owners <= learnt:
                kept.append(span)
        return kept


@dataclass(frozen=True)
class _Marked:
    """A rendered conversation, and the positions of the marks of its strings in it."""

    chat: _Conversation
    form: MarkedMessages
    text: str
    placed: list[FoundMark]

    def of(self, index: int) -> list[FoundMark]:
        """Return the marks of a message up to the first repeated one: a tool's answer may repeat the call's name."""
        own = [found for found in self.placed if found.mark.message == index]
        seen = [found.character for found in own]
        return own[: next((i for i, each in enumerate(seen) if each in seen[:i]), len(own))]

    def require_tool_calls(self) -> None:
        """Raise _NotFound if the template leaves out a tool call."""
        of_calls = [mark for mark in self.form.marks.values() if mark.field == CALLS]
        calling = {mark.message for mark in of_calls}
        placed = [found.mark for index in calling for found in self.of(index)]
        written = {(mark.message, mark.item) for mark in placed if mark.field == CALLS}
        left_out = next((mark for mark in of_calls if (mark.message, mark.item) not in written), None)
        if left_out is not None:
            number = f", call {left_out.item + 1}" if left_out.item else ""
            raise _NotFound(
                f", message {left_out.message + 1}{number}: the chat template does not write its tool calls"
            )

    def require_apart(self, span: Span, index: int) -> None:
        """Raise _NotFound if a span holds text of another message."""
        if not {found.mark.message for found in self._inside(span)} <= {index}:
            raise self.chat.not_found(index)

    def owners(self, span: Span) -> set[int]:
        """Return the messages whose text lies in a span; raise _NotFound if the span begins or ends inside a text."""
        for one, other in pairwise(self.placed):
            if one.mark.begins and not other.mark.begins and any(one.at < edge < other.at for edge in span):
                raise _NotFound(f", message {one.mark.message + 1}: {{% generation %}} marks a part of this text")
        return {found.mark.message for found in self._inside(span)}

    def span(self, index: int) -> Span:
        """Return the span of an answer that has marks: from the end of its prompt to the end of its closing token."""
        own = self.of(index)
        begin, end = self._begin(index, own[0]), self._end(index, own[-1])
        if not begin <= own[0].at <= own[-1].at <= end:
            raise self.chat.not_found(index)
        return begin, end

    def _inside(self, span: Span) -> Iterator[FoundMark]:
        start, end = span
        for found in self.placed:
            if start <= found.at < end if found.mark.begins else start < found.at <= end:
                yield found

    def _first_messages(self, count: int, *, prompt: bool = False) -> tuple[str, list[FoundMark]] | None:
        """Render the first `count` messages alone; return the text and its marks, None if the template rejects them."""
        written = self.chat.render(self.form.messages[:count], prompt=prompt)
        return None if written is None else self.form.read(written)

    def _begin(self, index: int, first: FoundMark) -> int:
        """Return the index after the generation prompt of an answer, whose first mark is `first`."""
        said = first.start(self.text)
        asked, without = self._first_messages(index, prompt=True), self._first_messages(index)
        if asked is None:
            at = self._behind_earlier(index, first)
            found = None if at is None else self._behind_header(self.text[at:said], self.chat.header)
            if at is not None and found is not None:
                return at + found
            if first.mark.field != "content":
                raise self.chat.not_found(index)
            return said
        prompt, at = self._behind_last_mark(asked, index)
        before, plain = self.text[at:said], "" if without is None else self._behind_last_mark(without, index)[0]
        # Compare up to the mark, not into the answer. If the template writes no header before an answer, the answer's
        # own first characters could be mistaken for the end of the prompt.
        own, found, up_to_mark = _without_prefix(prompt, plain), None, self.text[at : first.at]
        if own:
            found = _end_of(prompt, up_to_mark)
            # The prompt may continue differently from the conversation: it may open thoughts, which past turns omit.
            found = self._up_to_common(prompt, up_to_mark, plain) if found is None else found
        if found is None and self._is_template_alone(index):
            # In a whole conversation the template may write more text before the header.
            found = self._behind_header(before, own or self.chat.header)
        if found is None and not own:
            found = _end_of(prompt, up_to_mark)
            found = self._up_to_common(prompt, up_to_mark, "") if found is None else found
        if found is None:
            raise self.chat.not_found(index)
        return at + found

    def _up_to_common(self, prompt: str, before: str, plain: str) -> int | None:
        """Return the length of the common prefix of `prompt` and `before`; None if it lacks an answer's header."""
        common = _common_length(prompt, before)
        common -= len(_open_end(before[:common])) if common < len(before) else 0
        header = prompt[_common_length(prompt, plain) : common]
        return common if self._is_header(header) and header not in before[common:] else None

    def _behind_header(self, before: str, header: str) -> int | None:
        """Return the index after the header in the template's own text, or after its longest prefix found there."""
        length = next((n for n in range(len(header), 0, -1) if header[:n] in before), 0)
        at = before.find(header[:length])
        end = at + length
        end -= len(_open_end(before[:end])) if end < len(before) else 0
        found = before[at:end]
        return end if self._is_header(found) and before.count(found) == 1 else None

    def _is_header(self, text: str) -> bool:
        """Return whether a text can be an answer's header: not blank, and not written before a question."""
        return bool(text.strip()) and text not in self.chat.around_question[0]

    def _is_template_alone(self, index: int) -> bool:
        """Return whether only the template wrote the text between the previous message and this answer."""
        return index == 0 or bool(self.of(index - 1))

    def _behind_earlier(self, index: int, first: FoundMark) -> int | None:
        """Return where the messages before an answer end in the text; None if the previous message has no marks."""
        earlier = [found.at for found in self.placed if found.mark.message < index and found.at <= first.at]
        return max(earlier, default=0) if self._is_template_alone(index) else None

    def _behind_last_mark(self, beginning: tuple[str, list[FoundMark]], index: int) -> tuple[str, int]:
        """Return the text after the last mark of a partial rendering, and that mark's position in the whole."""
        text, placed = beginning
        if not placed:
            return text, 0
        last = placed[-1]
        times = sum(found.character == last.character for found in placed)
        places = [found.at for found in self.placed if found.character == last.character]
        if len(places) < times:
            raise self.chat.not_found(index)
        return text[last.at :], places[times - 1]

    def _end(self, index: int, last: FoundMark) -> int:
        """Return the index after the text that closes an answer's turn, trailing space left out unless it is all."""
        said = last.end(self.text)
        is_last = index + 1 == len(self.chat.messages)
        up_to = (self.text, self.placed) if is_last else self._first_messages(index + 1)
        ends = [] if up_to is None else [found for found in up_to[1] if found.character == last.character]
        if up_to is None or not ends or (not is_last and ends[-1] != up_to[1][-1]):
            if last.mark.field != "content":
                raise self.chat.not_found(index)
            closing = self._closed_by_next(index, last)
        else:
            # After the answer's last mark all text is the template's: it closes the turn, and perhaps goes on.
            closing = up_to[0][ends[0].at :]
            following = self._followed(last) if is_last else self.text[last.at :]
            if following is not None and not following.startswith(closing):
                closing = self._own_closing(closing, following, index, last.mark.field, is_last=is_last)
            elif not closing.strip() and not is_last:
                closing = self._closed_by_next(index, last) or closing
        end = max(last.at + len(closing), said)
        return len(self.text[:end].rstrip()) if self.text[said:end].strip() else end

    def _closed_by_next(self, index: int, last: FoundMark) -> str:
        """Return the closing text of a turn if the template writes it only before a question; otherwise nothing."""
        following = next((found for found in self.placed if found.at > last.at), None)
        is_question = following is not None and self.chat.messages[following.mark.message]["role"] == "user"
        if following is None or following.mark.message != index + 1 or not is_question:
            return ""
        closing, header = _split_before_common_end(self.text[last.at : following.at], self.chat.around_question[0])
        return closing if header.strip() and closing.strip() else ""

    def _followed(self, last: FoundMark) -> str | None:
        """Render a question after the last answer; return the text after that answer, None if it is rejected."""
        written = self.chat.render([*self.form.messages, _PROBE])
        text, placed = self.form.read(written or "")
        places = [found.at for found in placed if found.character == last.character]
        return text[places[0] :] if len(places) == 1 else None

    def _own_closing(self, closing: str, following: str, index: int, field: str, *, is_last: bool) -> str:
        """Return the part of `closing` that closes the turn.

        After the last message a template may write more than after other turns: the end of the document, or a
        generation prompt. `following` is the text after the same answer if another message follows.
        """
        asked = self.chat.render(self.chat.messages[:index]) or ""
        shared = closing[: _common_length(closing, following)]
        # If the template always writes a generation prompt at the end, the next turn may begin like that prompt.
        always_asks = asked == self.chat.render(self.chat.messages[:index], prompt=True)
        opened = [at for at in map(shared.find, self.chat.openings) if at >= 0]
        kept = (_FIRST_CLOSED if always_asks and not self.chat.openings else _CLOSED).match(shared)
        shared = shared[: min(opened)] if opened else kept[0] if kept else ""
        rest = closing[len(shared) :]
        is_of_any_end = bool(asked) and asked.endswith(rest)
        closes_all = bool(self.chat.template.eos) and rest.strip().startswith(self.chat.template.eos)
        if is_last and (not is_of_any_end or (closes_all and not shared.strip())):
            return closing
        if field != "content" and not opened and not is_of_any_end:
            raise self.chat.not_found(index)  # a call would be cut off
        return shared


def _open_end(text: str) -> str:
    """Return the end of a text from its last unclosed bracket on: the beginning of a token such as <|end|>."""
    found = _OPEN.search(text)
    return found[0] if found else ""


def _common_length(a: str, b: str) -> int:
    """Return the length of the longest common prefix, in characters."""
    if a.startswith(b):
        return len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _without_prefix(text: str | None, prefix: str | None) -> str:
    """Return `text` without `prefix`; "" if either is None or `text` does not begin with it."""
    return text[len(prefix) :] if text is not None and prefix is not None and text.startswith(prefix) else ""


def _end_of(prompt: str, before: str) -> int | None:
    """Return where `prompt` ends in `before`; None unless `before` begins with it, white space aside."""
    if before.startswith(prompt):
        return len(prompt)
    end, words = 0, "".join(prompt.split())
    for char in words:
        while before[end : end + 1].isspace():
            end += 1
        if before[end : end + 1] != char:
            return None
        end += 1
    return end + _common_length(before[end:], prompt[len(prompt.rstrip()) :]) if words else None


def _split_before_common_end(text: str, other: str) -> tuple[str, str]:
    """Split `text` before the longest common suffix with `other`, never inside a token in brackets."""
    length = len(text) - _common_length(text[::-1], other[::-1])
    if _open_end(text[:length]):
        closed = _FIRST_CLOSED.match(text, length)
        length = closed.end() if closed else len(text)
    return text[:length], text[length:]
