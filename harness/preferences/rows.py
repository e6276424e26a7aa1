"""Read a row of preferences: a prompt with a chosen and a rejected completion, or with one completion and its label.

The forms of TRL: `prompt`, `chosen` and `rejected`, as texts or as messages; without `prompt` it is what both
completions begin with. Those of axolotl and of ShareGPT-like data: `question`, `instruction` (with `input`) or `input`,
a question in a chat, perhaps with `system`; `messages` or `conversations`, the chat so far; `chosen_response` and
`rejected_response`; a completion that repeats its prompt. Labelled rows have `completion` and `label`, or `messages`
and `label`. A row that cannot be used raises UserError with its location.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from harness.data.rows.kinds import ASSISTANT, COMPLETION, USER, document, from_sharegpt
from harness.errors import UserError

Said: TypeAlias = "str | list[object]"
"""A text, or messages."""

_QUESTIONS = ("question", "instruction", "input")
_CHATS = ("messages", "conversations")
_PROMPTS = ("prompt", *_QUESTIONS, *_CHATS)
_CHOSEN = ("chosen", "chosen_response")
_REJECTED = ("rejected", "rejected_response")
_LABELS: Mapping[object, bool] = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A prompt and one completion.

    Attributes:
        text: a document of `harness.data`: the conversation as JSON.
        place: where its row is, for messages.
        desirable: its label; True for a chosen completion.
    """

    text: str
    place: str
    desirable: bool


def is_paired(columns: Sequence[str]) -> bool:
    """Return whether a row with these columns has a chosen and a rejected completion."""
    return any(name in columns for name in (*_CHOSEN, *_REJECTED))


def pair(row: Mapping[str, object], location: str) -> tuple[Answer, Answer]:
    """Return the chosen and the rejected completion of a row. UserError if they are equal, or one cannot be used."""
    values = [_of_column(row, names, location) for names in (_CHOSEN, _REJECTED)]
    prompt = _prompt(row, location)
    chosen, rejected = (_said(value, f"{location}: `{name}`") for name, value in values)
    if prompt is None or (isinstance(prompt, str) and _repeat_prompt(chosen, rejected)):
        prompt, chosen, rejected = _without_beginning(chosen, rejected, location)
    _require_said(prompt, location)
    answers = [_joined(prompt, said) for said in (chosen, rejected)]
    if answers[0] == answers[1]:
        raise UserError(f"{location}: `{values[0][0]}` and `{values[1][0]}` are equal: remove the row")
    first, second = (
        _answer(row, both, location, name, desirable=name in _CHOSEN)
        for both, (name, _) in zip(answers, values, strict=True)
    )
    return first, second


def labelled(row: Mapping[str, object], location: str) -> Iterator[Answer]:
    """Yield the completions of a row with their labels: one, or the two of a pair."""
    if is_paired(list(map(str, row))):
        yield from pair(row, location)
        return
    _, label = _of_column(row, ("label",), location)
    if (
        label is None
        or isinstance(label, float)
        or (key := label.lower() if isinstance(label, str) else label) not in _LABELS
    ):
        raise UserError(f"{location}: `label` is {label!r}: give true for a desirable completion, false for another")
    prompt = _prompt(row, location)
    said: Said
    if "completion" not in row and prompt is not None and not isinstance(prompt, str):
        prompt, said = prompt[:-1], prompt[-1:]
    else:
        said = _said(_of_column(row, ("completion",), location)[1], f"{location}: `completion`")
        if isinstance(said, list) and (prompt is None or (isinstance(prompt, str) and _role(said[0]) != ASSISTANT)):
            prompt = said[:-1]
            said = said[-1:]
    if prompt is None:
        raise UserError(f"{location} has no `prompt` (it has: {_names(row)}): give one, or completions as messages")
    _require_said(prompt, location)
    yield _answer(row, _joined(prompt, said), location, "completion", desirable=_LABELS[key])


def _of_column(row: Mapping[str, object], names: Sequence[str], location: str) -> tuple[str, object]:
    """Return the name and the value of the first of these columns that a row has."""
    for name in names:
        if row.get(name) is not None:
            return name, row[name]
    if names[0] in row:
        raise UserError(f"{location}: `{names[0]}` is missing: remove the row")
    wanted = (
        "`prompt`, `completion` and `label`"
        if names[0] in ("label", "completion")
        else "`prompt`, `chosen` and `rejected`"
    )
    raise UserError(f"{location} has no column `{names[0]}` (it has: {_names(row)}): these preferences are {wanted}")


def _names(row: Mapping[str, object]) -> str:
    return ", ".join(map(str, row)) or "nothing"


def _prompt(row: Mapping[str, object], location: str) -> Said | None:
    """Return the prompt of a row, a text or messages; None if its completions hold it."""
    name = next((name for name in _PROMPTS if row.get(name) is not None), None)
    system = row.get("system")
    if name is None:
        return None
    value = row[name]
    if name in _QUESTIONS and isinstance(value, str):
        more = row.get("input") if name == "instruction" else None
        text = f"{value}\n\n{more}" if isinstance(more, str) and more.strip() else value
        value = [{"role": USER, "content": text}]
    said = _said(value, f"{location}: `{name}`")
    if not (isinstance(system, str) and system.strip()):
        return said
    if isinstance(said, str):
        raise UserError(f"{location} has `system` beside a `prompt` that is a text: write both as messages")
    return [{"role": "system", "content": system}, *said]


def _said(value: object, location: str) -> Said:
    """Return a text, or messages by role and content. UserError for anything else, or if nothing is said."""
    if isinstance(value, Mapping):
        value = [value]
    said = from_sharegpt(value, location)
    if not isinstance(said, str | list):
        raise UserError(f"{location} is {type(value).__name__}: give a text, or a list of {{role, content}}")
    if "`prompt`" not in location and not (said.strip() if isinstance(said, str) else said):
        raise UserError(f"{location} is empty: remove the row")
    return said


def _require_said(prompt: Said, location: str) -> None:
    """Raise UserError for an empty prompt: completions of nothing cannot be compared as answers to it."""
    texts = (
        [prompt] if isinstance(prompt, str) else [each.get("content") for each in prompt if isinstance(each, Mapping)]
    )
    if not any(text.strip() if isinstance(text, str) else text for text in texts):
        raise UserError(f"{location}: the prompt is empty: give one, or remove the row")


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def _repeat_prompt(chosen: Said, rejected: Said) -> bool:
    """Return whether both completions are chats that begin with their prompt, which the row also has as a text."""
    return all(isinstance(said, list) and _role(said[0]) != ASSISTANT for said in (chosen, rejected))


def _without_beginning(chosen: Said, rejected: Said, location: str) -> tuple[Said, Said, Said]:
    """Return what both completions begin with, and the rest of each.

    A space between a text's beginning and its rest belongs to the rest, as in TRL: tokens often begin with one.
    """
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError(f"{location}: `chosen` and `rejected` are a text and messages: give both in one form")
    if chosen == rejected:
        raise UserError(f"{location}: `chosen` and `rejected` are equal: remove the row")
    shorter = min(len(chosen), len(rejected))
    end = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    if isinstance(chosen, str) and end and chosen[end - 1] == " ":
        end -= 1
    return chosen[:end], chosen[end:], rejected[end:]


def _joined(prompt: Said, said: Said) -> tuple[Said, Said]:
    """Return a prompt and its completion in one form, both texts or both messages."""
    if isinstance(prompt, str) and isinstance(said, str):
        return prompt, said
    asked: list[object] = [{"role": USER, "content": prompt}] if isinstance(prompt, str) else prompt
    answered: list[object] = [{"role": ASSISTANT, "content": said}] if isinstance(said, str) else said
    return asked, answered[len(asked) :] if asked and answered[: len(asked)] == asked else answered


def _answer(row: Mapping[str, object], both: tuple[Said, Said], location: str, name: str, *, desirable: bool) -> Answer:
    prompt, completion = both
    if _says_nothing(completion):
        raise UserError(f"{location}: `{name}` is empty: remove the row")
    place = location if name == "completion" else f"{location}, `{name}`"
    asked = {"prompt": prompt, "completion": completion, "tools": row.get("tools")}
    return Answer(text=document(asked, COMPLETION, place)["conversation"], place=place, desirable=desirable)


def _says_nothing(completion: Said) -> bool:
    if isinstance(completion, str):
        return not completion.strip()
    answers = [each for each in completion if isinstance(each, Mapping) and each.get("role") == ASSISTANT]
    silent = all(not message.get("tool_calls") and message.get("content") in ("", None, []) for message in answers)
    return not completion or (bool(answers) and silent)
