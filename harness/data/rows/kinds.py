"""Turn one row of a data file or data set into a document: text, a conversation, or a prompt with its completion.

The columns decide the kind, in this order: `messages` (a list of {role, content}), `conversations` (ShareGPT), `prompt`
and `completion` (two texts, or two lists of messages), `instruction` and `output` (Alpaca), `text`. Each row becomes a
document: {"text": ...}, or {"conversation": ..., "place": ...} with the conversation as JSON, which keeps tool calls
and anything else that a chat template reads. A row that cannot be used raises UserError with its location. Importing
this module imports neither torch nor datasets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from harness.config.values.json_object import JsonObject
from harness.data.rows.tools import calls_of_turn, parsed, tool_calls, tool_schemas
from harness.errors import UserError

_ROLES = MappingProxyType(
    {
        "human": "user",
        "gpt": "assistant",
        "chatgpt": "assistant",
        "bot": "assistant",
        "model": "assistant",
        "observation": "tool",
        "function_response": "tool",
    }
)
"""ShareGPT's role -> the role in chat templates; roles not listed are the same."""
_CALLING = "function_call"
"""ShareGPT's role of a turn that calls tools."""
USER, ASSISTANT = "user", "assistant"
TOOL_ROLES = ("tool", "function", "ipython")
"""Roles of messages that say what a tool has returned."""


def from_sharegpt(turns: object, location: str) -> object:
    """Return ShareGPT's turns, {from, value}, as messages, {role, content}; anything else unchanged.

    A turn of `function_call` becomes the tool calls of an answer. Raises UserError if it is not the JSON text of one.
    """
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        return turns
    return [_message(turn, f"{location}, message {number}") for number, turn in enumerate(turns, start=1)]


def _message(turn: object, location: str) -> object:
    if not isinstance(turn, Mapping) or "from" not in turn or turn.get("role") is not None:
        return turn
    rest = {name: value for name, value in turn.items() if name not in ("from", "value", "role")}
    if turn["from"] == _CALLING:
        return {"role": ASSISTANT, "tool_calls": calls_of_turn(turn.get("value"), location), **rest}
    return {"role": _ROLES.get(str(turn["from"]), turn["from"]), "content": turn.get("value"), **rest}


def from_alpaca(row: Mapping[str, object], location: str) -> list[dict[str, object]]:
    """Return an Alpaca row as messages: the turns of `history`, then instruction (with input below it) and output.

    Raises UserError if `history` is not a list of pairs [instruction, answer].
    """
    asked = row["instruction"]
    given = row.get("input")
    if isinstance(asked, str) and isinstance(given, str) and given.strip():
        asked = f"{asked}\n\n{given}"
    system = row.get("system")
    turns = row.get("history") or []
    messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise UserError(f"{location}: `history` is {type(turns).__name__}, not a list of [instruction, answer]")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise UserError(f"{location}: `history`, turn {number} is not a pair [instruction, answer]")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]


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
"""Kind of a row -> the columns that it must have."""

_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(_MEDIA, "only text is supported"),
        "chat_template_kwargs": "write what they choose into the tokenizer's chat template",
        "functions": "write them as `tools`, each {type: function, function: ...}",
        "function_call": "write it as `tool_calls`",
        "documents": "write them into the messages",
        "chosen": "train on preferences with --preference",
        "rejected": "train on preferences with --preference",
    }
)
"""Unsupported columns that would change the training -> the advice in the error message. Empty columns are allowed."""

_MARKS = ("label", "weight", "train", "training", "loss")
"""Columns with which other programs exclude a row from the loss, or weight it."""

BESIDE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        MESSAGES: ("system", "tools", *_MARKS, *REFUSED),
        SHAREGPT: ("system", "tools", *_MARKS, *REFUSED),
        COMPLETION: ("system", "tools", *_MARKS, *REFUSED),
        ALPACA: ("input", "system", "history", "tools", *_MARKS, *REFUSED),
        TEXT: _MEDIA,
    }
)
"""Kind of a row -> optional columns that are read."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
TRAINS = ("train", "training", "loss")
"""Keys of a message that include it in the loss or exclude it; OpenAI's key is `weight`, 0 or 1."""
ROLES = ("system", "developer", USER, ASSISTANT, *TOOL_ROLES)


def columns_of(kind: str) -> str:
    """Return the columns of a kind in words, for an error message."""
    return " and ".join(f"`{name}`" for name in COLUMNS[kind]) if kind in COLUMNS else kind


def kind_of_row(columns: Iterable[str], location: str) -> str:
    """Return the kind of a row with these columns. UserError if there is none."""
    names = list(map(str, columns))
    for kind, needed in COLUMNS.items():
        if set(needed) <= set(names):
            return kind
    if {"chosen", "rejected"} <= set(names):
        raise UserError(
            f"{location} has `chosen` and `rejected`: train on preferences with --preference dpo, or another"
        )
    raise UserError(
        f"{location} has no column `text`, `messages`, `conversations`, `prompt` and `completion`, or `instruction` "
        f"and `output` (it has: {', '.join(names) or 'none'}): rename one"
    )


def document(row: Mapping[str, object], kind: str, location: str) -> dict[str, str]:
    """Convert a row of a file or data set of this kind into a document.

    Raises:
        UserError: a column is missing or not supported, or its content cannot be used.
    """
    missing = [name for name in COLUMNS[kind] if name not in row]
    if missing:
        raise UserError(
            f"{location} has no column `{missing[0]}` (it has: {', '.join(map(str, row)) or 'none'}), "
            "unlike earlier rows: keep rows of one kind in a file"
        )
    unused = next((name for name in REFUSED if name in BESIDE[kind] and _is_there(row.get(name))), None)
    if unused is not None:
        raise UserError(
            f"{location} has `{unused}`, which is not used: {REFUSED[unused]}; remove the row or the column"
        )
    if kind == TEXT:
        return {"text": checked_text(row["text"], f"{location}: `text`")}
    left_out = next((name for name in _MARKS if name in row and _says_no(name, row[name])), None)
    if left_out is not None:
        raise UserError(
            f"{location}: `{left_out}` is {row[left_out]!r}: no row can be weighted or left out; "
            "remove it or the column"
        )
    conversation = _completion(row, location) if kind == COMPLETION else _messages(row, kind, location)
    if tools := tool_schemas(row.get("tools"), f"{location}: `tools`"):
        conversation["tools"] = tools
    try:
        written = json.dumps(conversation, ensure_ascii=False)
    except RecursionError as error:
        raise UserError(f"{location} is nested too deeply to be written as JSON") from error
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{location} contains a value that is not JSON ({error}): use text, numbers and lists"
        ) from error
    return {"conversation": checked_text(written, location), "place": location}


def checked_text(text: object, location: str) -> str:
    """Return `text` if it is a string that can be encoded as UTF-8; otherwise raise UserError."""
    if not isinstance(text, str):
        raise UserError(f"{location} is {'missing' if text is None else type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{location} holds half a surrogate pair at character {error.start}") from error
    return text


def _messages(row: Mapping[str, object], kind: str, location: str) -> JsonObject:
    given = row.get("messages")
    if kind == MESSAGES:
        given = _with_system(given, row, location)
    elif kind == SHAREGPT:
        turns = from_sharegpt(row["conversations"], f"{location}: `conversations`")
        given = _with_system(turns, row, location)
    elif kind == ALPACA:
        given = from_alpaca({**row, "history": parsed(row.get("history"), f"{location}: `history`")}, location)
    location = f"{location}: `{COLUMNS[kind][0]}`"
    messages = _checked_messages(given, location)
    return _with_answers(messages, 0, location)


def _with_system(messages: object, row: Mapping[str, object], location: str) -> object:
    """Put the system prompt of the column `system` before the messages. UserError if they already have one."""
    system = row.get("system")
    if not _is_there(system) or not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages
    if any(isinstance(message, Mapping) and message.get("role") == "system" for message in messages[:1]):
        raise UserError(f"{location} has a column `system` and a message of role system: keep one")
    return [{"role": "system", "content": system}, *messages]


def _completion(row: Mapping[str, object], location: str) -> JsonObject:
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str):
        checked_text(completion, f"{location}: `completion`")
        if _is_there(row.get("system")):
            raise UserError(f"{location} has `system` beside a `prompt` that is a text: write it into the prompt")
    prompt = _with_system(prompt, row, location)
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise UserError(f"{location}: `completion` is empty: remove the row")
        return {"prompt": prompt, "completion": completion}
    asked = _checked_messages(prompt, f"{location}: `prompt`")
    answered = _checked_messages(completion, f"{location}: `completion`")
    return _with_answers([*asked, *answered], len(asked), f"{location}: `completion`")


def _checked_messages(messages: object, location: str) -> list[JsonObject]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        kind = "missing" if messages is None else type(messages).__name__
        raise UserError(f"{location} is {kind}, not a list of {{role, content}}")
    if not messages:
        raise UserError(f"{location} is empty: remove the row")
    return [_checked_message(message, f"{location}, message {i}") for i, message in enumerate(messages, start=1)]


def _checked_message(message: object, location: str) -> JsonObject:
    if not isinstance(message, Mapping):
        raise UserError(f"{location} is {type(message).__name__}, not an object with role and content")
    # Arrow gives all messages of a column the same fields, and null where a message has none.
    kept = {str(name): value for name, value in message.items() if value is not None}
    role = kept.get("role")
    if role is None:
        raise UserError(f"{location} has no `role` (it has: {', '.join(kept) or 'nothing'}): give role and content")
    if role not in ROLES:
        raise UserError(f"{location}: role {role!r} is not one of {', '.join(ROLES)}")
    unused = next((name for name in REFUSED if _is_there(kept.get(name))), None)
    if unused is not None:
        raise UserError(f"{location} has `{unused}`, which is not used: {REFUSED[unused]}")
    if "tool_calls" in kept:
        kept["tool_calls"] = tool_calls(kept["tool_calls"], f"{location}: `tool_calls`")
    for name in (name for name in THOUGHTS if name in kept and role == ASSISTANT):
        kept[name] = checked_text(kept[name], f"{location}: `{name}`")
    # A server hands on no empty thought and no empty list of calls, and some templates would write them.
    empty = [name for name in ("tool_calls", *THOUGHTS) if name in kept and not _is_there(kept[name])]
    kept = {name: value for name, value in kept.items() if name not in empty}
    thinks = role == ASSISTANT and any(name in kept for name in THOUGHTS)
    if "content" in kept or "tool_calls" not in kept:
        kept["content"] = _content(kept.get("content", "" if thinks else None), location)
    return kept


def _is_empty(answer: JsonObject) -> bool:
    """Return whether an answer says nothing: no text, no tool call and no thought."""
    return not any(_is_there(answer.get(name)) for name in ("content", "tool_calls", *THOUGHTS))


def _content(content: object, location: str) -> str:
    """Return the text of a message. UserError if its content is a list with a part that is not text."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return checked_text(content, f"{location}: `content`")
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) < len(content):
        raise UserError(f"{location}: `content` has parts that are not text: only text is supported")
    return "".join(checked_text(text, f"{location}: `content`") for text in texts)


def _with_answers(messages: list[JsonObject], answers_from: int, location: str) -> JsonObject:
    """Return the messages as JSON, with the answers to leave out of the loss.

    `answers_from` is the first message whose answers are trained on; `unlearnt` are indices of answers that exclude
    themselves. Raises UserError if no answer is left.
    """
    kept, unlearnt = [], []
    for index, message in enumerate(messages):
        place = f"{location}, message {index + 1 - (answers_from if index >= answers_from else 0)}"
        is_learnt = _is_learnt(message, place)
        if message["role"] == ASSISTANT and not is_learnt:
            unlearnt.append(index)
        elif message["role"] == ASSISTANT and index >= answers_from and _is_empty(message):
            raise UserError(f"{place} is an empty answer: remove it and its question, or give it `weight` 0")
        kept.append({name: value for name, value in message.items() if name not in (*TRAINS, "weight")})
    answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i >= answers_from]
    if not answers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages[answers_from:]))
        raise UserError(f"{location} has no message of role {ASSISTANT} to train on (roles: {roles})")
    if set(answers) <= set(unlearnt):
        raise UserError(
            f"{location} has no answer to train on: each has weight 0 or says that it is not trained; remove it"
        )
    return {"messages": kept, "answers_from": answers_from, **({"unlearnt": unlearnt} if unlearnt else {})}


def _is_learnt(message: JsonObject, location: str) -> bool:
    """Return whether a message may be trained on, by its own keys. Raises UserError for an unsupported key."""
    partly = next((name for name in ("train_detail", "training_detail") if _is_there(message.get(name))), None)
    if partly is not None:
        raise UserError(
            f"{location} has `{partly}`: a part of an answer cannot be left out; give `train`, or split the row"
        )
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise UserError(f"{location}: `weight` is {weight!r}: give 0 or 1")
    told = {name: message[name] for name in TRAINS if name in message}
    for name, value in told.items():
        if value not in (False, True):
            raise UserError(f"{location}: `{name}` is {value!r}: give true or false")
        if value and message["role"] != ASSISTANT:
            raise UserError(
                f"{location}: `{name}` is true, but only answers of role {ASSISTANT} are trained on: remove it"
            )
    return weight != 0 and all(told.values())


def _says_no(name: str, value: object) -> bool:
    """Return whether a column of _MARKS is false, or a weight other than 1. Other numbers may be classes or scores."""
    return (value not in (None, 1)) if name == "weight" else str(value).lower() == "false"


def _is_there(value: object) -> bool:
    """Return whether an unsupported column holds anything."""
    return bool(value.strip() if isinstance(value, str) else value)


def plain_row(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row of an Arrow table without null fields: Arrow pads all objects of a column to the same fields."""
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
