"""Find the characters of a rendered conversation that are the assistant's answers: only they are trained on.

One rule holds for every row, whatever file or data set it comes from: **the tokens that are trained are those that the
same tokenizer and template produce when the model is served; every part of the row is in them, or the row is refused by
file and line; and exactly the tokens that the model must write itself are learnt, the one that stops it included.**
`find_answers` enforces it, with `parts.py` for the second clause.

`turns.py` locates the answers, unless the template marks them with {% generation %}: then these marks decide.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from itertools import pairwise

from harness.config.values.json_object import JsonObject
from harness.data.conversation import Conversation, Span, Unusable, forms
from harness.data.marks import CALLS
from harness.data.parts import require_parts
from harness.data.rows.kinds import ASSISTANT, TOOL_ROLES, USER
from harness.data.templates import Template
from harness.data.turns import QUESTION, Turns, common_length, end_of, not_found
from harness.errors import UserError

_TOKEN = re.compile(r"<[^<>]+>")
_OPEN_TOKEN = re.compile(r"(<[^<>\s]*|\[[^\[\]<>\s]*)\Z")
_NO_THOUGHT = re.compile(rf"\s*{_TOKEN.pattern}[\s\w]*{_TOKEN.pattern}\s*")
"""A thought that a generation prompt opens and closes at once, so that the model does not think."""


@dataclass(frozen=True)
class Answers:
    """A rendered conversation, and the spans of it that are trained on, in order."""

    text: str
    spans: list[Span]


def find_answers(
    template: Template, messages: list[JsonObject], tools: list[JsonObject] | None, learnt: Set[int], location: str
) -> Answers:
    """Render a conversation and locate the messages to train on.

    Args:
        learnt: indices of these messages.
        location: where the conversation stands (file and line), for errors.

    Raises:
        UserError: the template rejects the conversation or leaves out a part of it, or an answer cannot be located, is
            not written as it is served, or has no token that ends it.
    """
    reasons: list[str] = []
    for form in forms(messages):
        try:
            return _found(Conversation(template, form, tools, location), learnt)
        except Unusable as error:
            reasons.append(str(error))
    # The form that the template takes tells most. It rejects others, or leaves out their questions.
    telling = [reason for reason in reasons if "rejects it" not in reason and f"role {USER}" not in reason]
    raise UserError(location + [*telling, *reasons][0])


def _found(chat: Conversation, learnt: Set[int]) -> Answers:
    """Return one form of a conversation, rendered, and the spans of the messages `learnt`. Raises Unusable."""
    text = chat.write()
    marked = chat.marked(text)
    require_parts(chat, text, marked)
    if marked is None:
        first = next(index for index, message in enumerate(chat.messages) if message["role"] == ASSISTANT)
        raise not_found(first)
    turns = Turns(chat, marked)
    last = len(chat.messages) - 1
    prompts = {index: _served_prompt(turns, index) for index in sorted(learnt)}
    if chat.template.marks_answers:
        spans = _generated(turns, learnt)
    else:
        spans = [_to_stop(turns, index, turns.span(index)) for index in sorted(learnt)]
        if any(start < end for (_, end), (start, _) in pairwise(spans)):
            raise Unusable(": the chat template does not write the answers one after the other")
        if last in learnt:
            text, spans[-1] = _with_stop(turns, spans[-1])
    if (served := prompts.get(last)) is not None:
        text, spans = _behind_prompt(text, spans, *served, is_marked=chat.template.marks_answers)
    return Answers(text, [span for span in spans if span[0] < span[1]])


# -- what is served ---------------------------------------------------------------------------------------------


def _served_prompt(turns: Turns, index: int) -> tuple[str, int] | None:
    """Return the generation prompt, and all before it, that a server writes before an answer; None if it never does.

    With it comes the index of the answer behind the prompt, in the rendering in which it is the last message. There the
    prompt may have other space, and may lack a thought that it opens and closes, as templates write it that can do
    without thoughts. Raises Unusable if the answer stands behind something else.
    """
    chat = turns.chat
    asked = turns.first_messages(index, prompt=True)
    is_last = index + 1 == len(chat.messages)
    answered = (turns.text, turns.placed) if is_last else turns.first_messages(index + 1)
    if index == 0 or asked is None or answered is None:
        return None
    (prompt, _), (text, placed) = asked, answered
    first = next((found.at for found in placed if found.mark.message == index), len(text))
    at = end_of(prompt, text if text.startswith(prompt) else text[:first])
    if at is not None:
        return prompt, at
    at = common_length(prompt, text)
    unclosed = _OPEN_TOKEN.search(prompt[:at])
    at = unclosed.start() if unclosed else at
    rest = prompt[at:]
    between = text[at:first]
    if _NO_THOUGHT.fullmatch(rest) and not any(token in between for token in _TOKEN.findall(rest)):
        return prompt, at
    raise Unusable(
        f", message {index + 1}: the generation prompt of the chat template ends with {rest[-40:]!r}, and this "
        "answer is written without it: give its thoughts (`reasoning_content`), or use another template"
    )


def _behind_prompt(text: str, spans: list[Span], prompt: str, at: int, *, is_marked: bool) -> tuple[str, list[Span]]:
    """Return the text and spans of a conversation whose last answer, from `at` on, follows what a server writes."""
    if text.startswith(prompt):
        behind = text[len(prompt) :]
    else:
        behind = text[at:].lstrip() if prompt[-1:].isspace() else text[at:]
    moved = len(prompt) + len(behind) - len(text)
    kept = [(start, end) if end <= at else (max(start + moved, len(prompt)), end + moved) for start, end in spans]
    if not is_marked:
        kept[-1] = len(prompt), kept[-1][1]  # whatever follows the prompt, the model has to write
    return prompt + behind, kept


def _to_stop(turns: Turns, index: int, span: Span) -> Span:
    """Return the span of an answer to the end of the token that stops it; unchanged for the last one.

    A template may close no turn, but begin each with a token: then the next turn's token stops the answer. If it closes
    the last turn by a token that it replaces in earlier ones, these are learnt without: the model never writes theirs.
    """
    span = _up_to_token(turns, index, span)
    messages = turns.chat.messages
    start, end = span
    if index + 1 == len(messages) or _is_closed(turns, index, span) or turns.closes_turns:
        return span
    role = messages[index + 1]["role"]
    following = turns.until_next_text(end)
    stop = turns.first_token(following)
    if stop and (role in (USER, *TOOL_ROLES) or stop == turns.stop_before_question):
        return start, end + len(stop)
    if _ends_with_token(turns, index, span):
        return span
    if not turns.stop_before_question:
        raise _no_stop(index)
    raise Unusable(
        f", message {index + 1}: no token that a model writes ends this answer, as a message of role {role} follows: "
        "move that message, or remove it"
    )


def _up_to_token(turns: Turns, index: int, span: Span) -> Span:
    """Return the span of an answer without text that the template writes behind the token that stops it."""
    own = turns.marked.of(index)
    start, end = span
    said = own[-1].end(turns.text) if own and own[-1].mark.field == "content" else end
    last = max((found.end() for found in turns.chat.template.tokens(turns.text[said:end])), default=end - said)
    return start, said + last


def _with_stop(turns: Turns, span: Span) -> tuple[str, Span]:
    """Return the text and the last answer's span with the token that stops it.

    Some templates write it only as the first token of the next turn; then the text ends with it.
    """
    text = turns.text
    start, end = span
    index = len(turns.chat.messages) - 1
    if _is_closed(turns, index, span):
        return text, span
    stop = turns.stop_before_question
    own = turns.marked.of(index)
    if own and turns.chat.messages[index].get(CALLS):
        following = (turns.followed(own[-1], TOOL_ROLES[0]) or "").removeprefix(text[own[-1].at : end])
        stop = turns.first_token(following.partition(QUESTION)[0])
        if not stop and _ends_with_token(turns, index, span):
            return text, span
        stop = stop or turns.stop_before_question
    if not stop:
        raise _no_stop(index)
    return text[:end] + stop, (start, end + len(stop))


def _ends_with_token(turns: Turns, index: int, span: Span) -> bool:
    """Return whether the text of a tool call ends with a token of the template, before the tool answers."""
    written = turns.text[slice(*span)]
    tokens = [found.end() for found in turns.chat.template.tokens(written)]
    return bool(turns.chat.messages[index].get(CALLS)) and bool(tokens) and tokens[-1] == len(written.rstrip())


def _is_closed(turns: Turns, index: int, span: Span) -> bool:
    """Return whether the span of an answer ends with a token that stops it."""
    own = turns.marked.of(index)
    start, end = span
    if own and own[-1].mark.field != "content":  # tokens behind it may belong to a call or a thought
        return turns.closes_turns
    return turns.chat.template.first_token(turns.text[own[-1].end(turns.text) if own else start : end]) is not None


def _no_stop(index: int) -> Unusable:
    answer = (
        f", message {index + 1}: the chat template writes no token that ends this answer, so a model would not stop"
    )
    return Unusable(f"{answer}: let it write {{{{ eos_token }}}} behind each answer")


# -- {% generation %} -------------------------------------------------------------------------------------------


def _generated(turns: Turns, learnt: Set[int]) -> list[Span]:
    """Return the {% generation %} spans that belong to the messages `learnt`."""
    chat, marked = turns.chat, turns.marked
    spans = chat.template.generated(chat.messages, chat.tools, chat.location)
    answers = {index for index, message in enumerate(chat.messages) if message["role"] == ASSISTANT}
    for index in learnt:
        if marked.form.has(index) and not marked.of(index):
            raise not_found(index)
    kept = []
    for span in spans:
        owners = marked.owners(span) or _silent_owners(turns, span)
        if not owners <= answers or (owners & learnt and owners - learnt):
            raise Unusable(": {% generation %} of the chat template does not stand around single answers")
        start, end = _bounds(turns, owners) if owners <= learnt else (0, 0)
        if max(start, span[0]) < min(end, span[1]):
            kept.append((max(start, span[0]), min(end, span[1])))
    for index in sorted(learnt):
        last = max((span for span in kept if index in marked.owners(span)), default=None)
        if last is not None and marked.of(index)[-1].mark.field == "content" and not _is_closed(turns, index, last):
            raise Unusable(
                f", message {index + 1}: {{% generation %}} of the chat template leaves out the token that ends an "
                "answer: move {% endgeneration %} behind it"
            )
    return kept


def _bounds(turns: Turns, indices: Set[int]) -> Span:
    """Return the span of what the model writes itself of some answers; all of the text if it cannot be found."""
    try:
        spans = [_to_stop(turns, index, turns.span(index)) for index in sorted(indices)]
    except Unusable:
        return 0, len(turns.text)
    return spans[0][0], spans[-1][1]


def _silent_owners(turns: Turns, span: Span) -> set[int]:
    """Return the answers that a span without any text may belong to: those between the texts around it."""
    before = max((found.mark.message for found in turns.placed if found.at <= span[0]), default=0)
    after = min((found.mark.message for found in turns.placed if found.at >= span[1]), default=len(turns.chat.messages))
    around = range(before, min(after + 1, len(turns.chat.messages)))
    return {index for index in around if turns.chat.messages[index]["role"] == ASSISTANT}
