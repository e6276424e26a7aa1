"""What one row of a data file or data set is: text, a conversation, or a prompt with its completion.

The columns decide, in this order: `messages` (a list of {role, content}), `conversations` (ShareGPT's), `prompt` and
`completion` (two texts, or two lists of messages), `instruction` and `output` (Alpaca's), `text`. Each row becomes a
document: {"text": ...}, or {"conversation": ..., "place": ...} with the conversation as JSON, so that tool calls and
whatever else a chat template reads travel as they are. Everything wrong with a row is a UserError that names its place.
Importing this needs neither torch nor datasets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from harness.config.values.json_object import JsonObject
from harness.data.files.forms import from_alpaca, from_sharegpt
from harness.errors import UserError

TEXT, MESSAGES, COMPLETION, SHAREGPT, ALPACA = "text", "messages", "completion", "sharegpt", "alpaca"

COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        MESSAGES: ("messages",),
        SHAREGPT: ("conversations",),
        COMPLETION: ("prompt", "completion"),
        ALPACA: ("instruction", "output"),
        TEXT: ("text",),
    }
)
"""Kind of a row -> the columns that make it one."""

BESIDE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        MESSAGES: ("tools",),
        SHAREGPT: ("system", "tools"),
        COMPLETION: ("tools",),
        ALPACA: ("input", "system", "tools"),
        TEXT: (),
    }
)
"""Kind of a row -> columns that are read where they are there."""

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython")


def columns_of(kind: str) -> str:
    """Return the columns that make a row of this kind, for a message."""
    return " and ".join(f"`{name}`" for name in COLUMNS[kind]) if kind in COLUMNS else kind


def kind_of_row(columns: Iterable[str], place: str) -> str:
    """Return the kind of row that these columns make. UserError if they make none."""
    names = list(map(str, columns))
    for kind, needed in COLUMNS.items():
        if set(needed) <= set(names):
            return kind
    raise UserError(
        f"{place} has no column `text`, `messages`, `conversations`, `prompt` and `completion`, or `instruction` and "
        f"`output` (it has: {', '.join(names) or 'none'}): rename one"
    )


def document(row: Mapping[str, object], kind: str, place: str) -> dict[str, str]:
    """Return the document of a row that stands in a file or data set of this kind; UserError if it is not one."""
    missing = [name for name in COLUMNS[kind] if name not in row]
    if missing:
        raise UserError(
            f"{place} has no column `{missing[0]}` (it has: {', '.join(map(str, row)) or 'none'}), "
            "unlike earlier rows: keep rows of one kind in a file"
        )
    if kind == TEXT:
        return {"text": checked_text(row["text"], f"{place}: `text`")}
    conversation = _completion(row, place) if kind == COMPLETION else _messages(row, kind, place)
    if row.get("tools"):
        conversation["tools"] = row["tools"]
    try:
        written = json.dumps(conversation, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{place} contains a value that is not JSON ({error}): use text, numbers and lists") from error
    return {"conversation": checked_text(written, place), "place": place}


def checked_text(text: object, place: str) -> str:
    """`text` itself, if it is a string that UTF-8 can hold; else UserError."""
    if not isinstance(text, str):
        raise UserError(f"{place} is {'missing' if text is None else type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{place} holds half a surrogate pair at character {error.start}") from error
    return text


def _messages(row: Mapping[str, object], kind: str, place: str) -> JsonObject:
    given = row.get("messages")
    if kind == SHAREGPT:
        given = from_sharegpt(row["conversations"], row.get("system"))
    elif kind == ALPACA:
        given = from_alpaca(row)
    place = f"{place}: `{COLUMNS[kind][0]}`"
    messages = _checked_messages(given, place)
    _require_answer(messages, place)
    return {"messages": messages, "answers_from": 0}


def _completion(row: Mapping[str, object], place: str) -> JsonObject:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        checked_text(completion, f"{place}: `completion`")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise UserError(f"{place}: `completion` is empty: remove the row")
        return {"prompt": prompt, "completion": completion}
    asked = _checked_messages(prompt, f"{place}: `prompt`")
    answered = _checked_messages(completion, f"{place}: `completion`")
    _require_answer(answered, f"{place}: `completion`")
    return {"messages": [*asked, *answered], "answers_from": len(asked)}


def _checked_messages(messages: object, place: str) -> list[JsonObject]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        kind = "missing" if messages is None else type(messages).__name__
        raise UserError(f"{place} is {kind}, not a list of {{role, content}}")
    if not messages:
        raise UserError(f"{place} is empty: remove the row")
    return [_checked_message(message, f"{place}, message {i}") for i, message in enumerate(messages, start=1)]


def _checked_message(message: object, place: str) -> JsonObject:
    if not isinstance(message, Mapping):
        raise UserError(f"{place} is {type(message).__name__}, not an object with role and content")
    kept = {str(name): value for name, value in message.items() if value is not None}  # parquet fills up with nulls
    role = kept.get("role")
    if role is None:
        raise UserError(f"{place} has no `role` (it has: {', '.join(kept) or 'nothing'}): give role and content")
    if role not in ROLES:
        raise UserError(f"{place}: role {role!r} is not one of {', '.join(ROLES)}")
    calls_tools = role == ASSISTANT and kept.get("tool_calls")
    if "content" in kept or not calls_tools:
        kept["content"] = _content(kept.get("content"), place)
    if role == ASSISTANT and not calls_tools and not kept["content"].strip():
        raise UserError(f"{place} is an empty answer: remove it")
    return kept


def _content(content: object, place: str) -> str:
    """Return the text of a message, whose parts, if it comes in parts, must be text too."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return checked_text(content, f"{place}: `content`")
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) < len(content):
        raise UserError(f"{place}: `content` has parts that are not text: only text is supported")
    return "".join(checked_text(text, f"{place}: `content`") for text in texts)


def _require_answer(messages: Sequence[JsonObject], place: str) -> None:
    if not any(message["role"] == ASSISTANT for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise UserError(f"{place} has no message of role {ASSISTANT} to learn (roles: {roles})")
