"""Locate the answers of a conversation in its rendering: where each begins and where its turn is closed.

An answer begins where its generation prompt ends, and ends after the token that closes its turn. Both ends are found by
rendering the first few messages alone, with and without the generation prompt. A template may render a turn differently
when more messages follow (without its thoughts, for example). Therefore such a rendering is aligned with the whole
conversation at marks (`marks.py`), never by searching for the text of the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property

from harness.config.values.json_object import JsonObject
from harness.data.conversation import Conversation, Marked, Span, Unusable
from harness.data.marks import FoundMark, mark

QUESTION = "?"
# Special tokens look like <|end|> or [INST]. _OPEN: one whose bracket is not closed before the text ends.
_OPEN = re.compile(r"(<[^<>]*|\[[^\[\]]*)\Z")
_CLOSED = re.compile(r".*[>\]}]", re.DOTALL)
_TOKEN = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_OPENINGS = re.compile(rf"(?:\s*(?:{_TOKEN.pattern}))+")
_FIRST_CLOSED = re.compile(r".*?[>\]}]", re.DOTALL)


def not_found(index: int) -> Unusable:
    """Return the error for the answer at `index`."""
    return Unusable(
        f", message {index + 1}: this answer cannot be found in the output of the chat template: "
        "mark the answers in the template with {% generation %}"
    )


@dataclass(frozen=True)
class Turns:
    """Locates the answers of a conversation in its rendering."""

    chat: Conversation
    marked: Marked
    _beginnings: dict[tuple[int, bool], tuple[str, list[FoundMark]] | None] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The whole rendering."""
        return self.marked.text

    @property
    def placed(self) -> list[FoundMark]:
        """The marks in it, from left to right."""
        return self.marked.placed

    @cached_property
    def _answered_question(self) -> Turns | None:
        """A question and its answer alone; None if the template rejects them, or does not write the answer."""
        chat = self.chat
        plain = replace(chat, messages=[self._question, chat.said("assistant", "Yes")], tools=None)
        text = plain.render(plain.messages)
        marked = None if text is None else plain.marked(text)
        return None if marked is None or not marked.of(1) else Turns(plain, marked)

    @cached_property
    def closes_turns(self) -> bool:
        """Whether the template ends the last answer with a token of its own."""
        turns = self._answered_question
        if turns is None:
            return True
        closing = turns.text[turns.marked.of(1)[-1].end(turns.text) : turns.span(1)[1]]
        return self.chat.template.first_token(closing) is not None

    @cached_property
    def stop_before_question(self) -> str:
        """The token by which the template ends an answer when a question follows, and the space before; or ""."""
        turns = self._answered_question
        last = turns.marked.of(1)[-1] if turns else None
        following = turns.followed(last) if turns and last else None
        return self.first_token(following[last.end(turns.text) - last.at :]) if turns and last and following else ""

    def until_next_text(self, at: int) -> str:
        """Return what the template writes from an index of the text on, before the text of the next message."""
        return self.text[at : next((found.at for found in self.placed if found.at >= at and found.mark.begins), None)]

    def first_token(self, following: str) -> str:
        """Return the text up to the end of its first token if only space stands before that; else ""."""
        found = self.chat.template.first_token(following)
        return following[: found.end()] if found and not following[: found.start()].strip() else ""

    @property
    def _question(self) -> JsonObject:
        """A question to render alone or after a conversation: it shows what the template writes around messages."""
        return self.chat.said("user", QUESTION)

    @cached_property
    def header(self) -> str:
        """The generation prompt after a question; empty if the template always or never writes one."""
        question = self.chat.render([self._question])
        asked = self.chat.render([self._question], prompt=True)
        return _without_prefix(asked, question)

    @cached_property
    def around_question(self) -> tuple[str, str]:
        """The template's text before and after the question that begins a conversation."""
        form = mark([self._question], (), answers_alone=False, inside=False)
        text, placed = form.read(self.chat.render(form.messages) or "")
        return (text[: placed[0].at], text[placed[-1].at :]) if placed else ("", "")

    @cached_property
    def openings(self) -> list[str]:
        """The special tokens that a conversation begins with: they open turns and never close one."""
        found = _OPENINGS.match(self.around_question[0])
        tokens = _TOKEN.findall(found[0]) if found else []
        return [token for token in tokens if token != self.chat.template.eos]

    def span(self, index: int) -> Span:
        """Return the span of the answer at `index`, which is the template's own closing text included.

        Raises Unusable if it is not certain, or holds text of another message.
        """
        own = self.marked.of(index)
        if not own and self.marked.form.has(index):
            raise not_found(index)
        span = self._between_marks(index, own) if own else self._between_beginnings(index)
        if not {found.mark.message for found in self.marked.inside(span)} <= {index}:
            raise not_found(index)
        return span

    def _between_marks(self, index: int, own: list[FoundMark]) -> Span:
        """Return the span of an answer that has marks: from the end of its prompt to the end of its closing token."""
        begin = self._begin(index, own[0])
        end = self._end(index, own[-1])
        if not begin <= own[0].at <= own[-1].at <= end:
            raise not_found(index)
        return begin, end

    def _between_beginnings(self, index: int) -> Span:
        """Return the span between the generation prompt and the end of the turn; both must be prefixes of the whole."""
        messages = self.chat.messages
        asked = self.chat.render(messages[:index], prompt=True)
        up_to = self.text if index + 1 == len(messages) else self.chat.render(messages[: index + 1])
        if asked is None or up_to is None or not (self.text.startswith(up_to) and up_to.startswith(asked)):
            raise not_found(index)
        return len(asked), max(len(asked), len(up_to.rstrip()))

    def first_messages(self, count: int, *, prompt: bool = False) -> tuple[str, list[FoundMark]] | None:
        """Render the first `count` messages alone; return the text and its marks, None if the template rejects them."""
        if (count, prompt) not in self._beginnings:
            form = self.marked.form
            written = self.chat.render(form.messages[:count], prompt=prompt)
            self._beginnings[count, prompt] = None if written is None else form.read(written)
        return self._beginnings[count, prompt]

    def _begin(self, index: int, first: FoundMark) -> int:
        """Return the index after the generation prompt of an answer, whose first mark is `first`."""
        said = first.start(self.text)
        asked = self.first_messages(index, prompt=True)
        without = self.first_messages(index)
        if asked is None:
            at = self._behind_earlier(index, first)
            found = None if at is None else self._behind_header(self.text[at:said], self.header)
            if at is not None and found is not None:
                return at + found
            if first.mark.field != "content":
                raise not_found(index)
            return said
        prompt, at = self._behind_last_mark(asked, index)
        before = self.text[at:said]
        plain = "" if without is None else self._behind_last_mark(without, index)[0]
        # Compare up to the mark, not into the answer. If the template writes no header before an answer, the answer's
        # own first characters could be mistaken for the end of the prompt.
        own = _without_prefix(prompt, plain)
        found = None
        up_to_mark = self.text[at : first.at]
        if own:
            found = end_of(prompt, up_to_mark)
            # The prompt may continue differently from the conversation: it may open thoughts, which past turns omit.
            found = self._up_to_common(prompt, up_to_mark, plain) if found is None else found
        if found is None and self._is_template_alone(index):
            # In a whole conversation the template may write more text before the header.
            found = self._behind_header(before, own or self.header)
        if found is None and not own:
            found = end_of(prompt, up_to_mark)
            found = self._up_to_common(prompt, up_to_mark, "") if found is None else found
        if found is None:
            raise not_found(index)
        return at + found

    def _up_to_common(self, prompt: str, before: str, plain: str) -> int | None:
        """Return the length of the common prefix of `prompt` and `before`; None if it lacks an answer's header."""
        common = common_length(prompt, before)
        common -= len(open_end(before[:common])) if common < len(before) else 0
        header = prompt[common_length(prompt, plain) : common]
        return common if self._is_header(header) and header not in before[common:] else None

    def _behind_header(self, before: str, header: str) -> int | None:
        """Return the index after the header in the template's own text, or after its longest prefix found there."""
        length = next((n for n in range(len(header), 0, -1) if header[:n] in before), 0)
        at = before.find(header[:length])
        end = at + length
        end -= len(open_end(before[:end])) if end < len(before) else 0
        found = before[at:end]
        return end if self._is_header(found) and before.count(found) == 1 else None

    def _is_header(self, text: str) -> bool:
        """Return whether a text can be an answer's header: not blank, and not written before a question."""
        return bool(text.strip()) and text not in self.around_question[0]

    def _is_template_alone(self, index: int) -> bool:
        """Return whether only the template wrote the text between the previous message and this answer."""
        return index == 0 or bool(self.marked.of(index - 1))

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
            raise not_found(index)
        return text[last.at :], places[times - 1]

    def _end(self, index: int, last: FoundMark) -> int:
        """Return the index after the text that closes an answer's turn, trailing space left out unless it is all."""
        said = last.end(self.text)
        is_last = index + 1 == len(self.chat.messages)
        up_to = (self.text, self.placed) if is_last else self.first_messages(index + 1)
        ends = [] if up_to is None else [found for found in up_to[1] if found.character == last.character]
        if up_to is None or not ends or (not is_last and ends[-1] != up_to[1][-1]):
            if last.mark.field != "content":
                raise not_found(index)
            closing = self._closed_by_next(index, last)
        else:
            # After the answer's last mark all text is the template's: it closes the turn, and perhaps goes on.
            closing = up_to[0][ends[0].at :]
            following = self.followed(last) if is_last else self.text[last.at :]
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
        closing, header = _split_before_common_end(self.text[last.at : following.at], self.around_question[0])
        return closing if header.strip() and closing.strip() else ""

    def followed(self, last: FoundMark, role: str = "user") -> str | None:
        """Render another message after the last answer; return the text after that answer, None if it is rejected."""
        form = self.marked.form
        written = self.chat.render([*form.messages, {**self._question, "role": role}])
        text, placed = form.read(written or "")
        places = [found.at for found in placed if found.character == last.character]
        return text[places[0] :] if len(places) == 1 else None

    def _own_closing(self, closing: str, following: str, index: int, field: str, *, is_last: bool) -> str:
        """Return the part of `closing` that closes the turn.

        After the last message a template may write more than after other turns: the end of the document, or a
        generation prompt. `following` is the text after the same answer if another message follows.
        """
        asked = self.chat.render(self.chat.messages[:index]) or ""
        shared = closing[: common_length(closing, following)]
        # If the template always writes a generation prompt at the end, the next turn may begin like that prompt.
        always_asks = asked == self.chat.render(self.chat.messages[:index], prompt=True)
        opened = [at for at in map(shared.find, self.openings) if at >= 0]
        kept = (_FIRST_CLOSED if always_asks and not self.openings else _CLOSED).match(shared)
        closed = kept[0] if kept else ""
        shared = shared[: min(opened)] if opened else closed
        rest = closing[len(shared) :]
        is_of_any_end = bool(asked) and asked.endswith(rest)
        closes_all = bool(self.chat.template.eos) and rest.strip().startswith(self.chat.template.eos)
        if is_last and (not is_of_any_end or (closes_all and not shared.strip())):
            return closing
        if field != "content" and not opened and not is_of_any_end:
            raise not_found(index)  # a call would be cut off
        return shared


def open_end(text: str) -> str:
    """Return the end of a text from its last unclosed bracket on: the beginning of a token such as <|end|>."""
    found = _OPEN.search(text)
    return found[0] if found else ""


def common_length(a: str, b: str) -> int:
    """Return the length of the longest common prefix, in characters."""
    if a.startswith(b):
        return len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _without_prefix(text: str | None, prefix: str | None) -> str:
    """Return `text` without `prefix`; "" if either is None or `text` does not begin with it."""
    return text[len(prefix) :] if text is not None and prefix is not None and text.startswith(prefix) else ""


def end_of(prompt: str, before: str) -> int | None:
    """Return where `prompt` ends in `before`; None unless `before` begins with it, white space aside."""
    if before.startswith(prompt):
        return len(prompt)
    end = 0
    words = "".join(prompt.split())
    for char in words:
        while before[end : end + 1].isspace():
            end += 1
        if before[end : end + 1] != char:
            return None
        end += 1
    return end + common_length(before[end:], prompt[len(prompt.rstrip()) :]) if words else None


def _split_before_common_end(text: str, other: str) -> tuple[str, str]:
    """Split `text` before the longest common suffix with `other`, never inside a token in brackets."""
    length = len(text) - common_length(text[::-1], other[::-1])
    if open_end(text[:length]):
        closed = _FIRST_CLOSED.match(text, length)
        length = closed.end() if closed else len(text)
    return text[:length], text[length:]
