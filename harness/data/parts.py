"""Hold a conversation to the rule that its rendering has every part of it.

A chat template leaves out, without a word, what its author did not think of: a role that it does not know, a system
message in the middle, text beside a tool call, thoughts under another name, a description of a tool. What is left out
is not trained on, so such a row is refused. The parts are each message and its role, each string and value in it, and
each text that describes a tool. Keys that only link messages (`tool_call_id`, the name of a tool that answers) and
numbers beside a message's content are not parts.

A part is in the rendering if its marks are (`marks.py`), or, where it has none, if another value changes the rendering.
One part may be absent: a thought of an earlier turn that the template drops once a question follows, as it also does
when the model is served. While its turn is the last one, the template has to write it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

from harness.config.values.json_object import JsonObject
from harness.data.conversation import Conversation, Marked, Unusable
from harness.data.marks import CALLS, LINKS, TANGUT, Part, Path, parts, strings
from harness.data.rows.kinds import ASSISTANT, THOUGHTS, TOOL_ROLES, USER

_INSTRUCTIONS = ("system", "developer")
_OF_A_SCHEMA = frozenset({"type", "format", "title", "$schema", "$ref", "$id"})
"""Keys of a tool's JSON schema whose values a template may translate, as TypeScript's types, or leave out."""
_NEXT = MappingProxyType(
    {
        char: kind[(number + 1) % len(kind)]
        for kind in (string.ascii_lowercase, string.ascii_uppercase, string.digits)
        for number, char in enumerate(kind)
    }
)


def require_parts(chat: Conversation, text: str, marked: Marked | None) -> None:
    """Raise Unusable, naming the part, unless `text`, the rendering of a conversation, has every part of it."""
    written = {found.mark.part for found in marked.placed} if marked else set()
    said = [*_parts(chat)]
    for part in said:
        if part not in written and not (_is_read(chat, chat.messages, text, part) or _is_earlier_thought(chat, part)):
            raise Unusable(_left_out(chat, part))
    _require_values(chat, text)
    speaking = {part.message for part in said}
    for index, message in enumerate(chat.messages):
        if index not in speaking and not message.get(CALLS):
            _require_silent(chat, text, index)
        if isinstance(message.get("name"), str) and message["role"] not in TOOL_ROLES:
            _require_name(chat, text, index)
        if message["role"] not in (USER, ASSISTANT):
            _require_role(chat, text, index)
    if chat.tools:
        _require_tools(chat, chat.tools, text)


# -- the strings and values of messages ------------------------------------------------------------------------


def _parts(chat: Conversation) -> Iterator[Part]:
    for index, path, text in strings(chat.messages):
        for span in parts(text, chat.template.words):
            yield Part(index, path, text, span)


def _is_read(chat: Conversation, messages: Sequence[JsonObject], text: str | None, part: Part) -> bool:
    """Return whether the template writes something else than `text` if a part of the messages says something else."""
    start, end = part.span
    other = part.text[:start] + _other(part.text[start:end]) + part.text[end:]
    return chat.render(_replaced(messages, part.message, part.path, other)) != text


def _is_earlier_thought(chat: Conversation, part: Part) -> bool:
    """Return whether a part is a thought before a later question, and written where its turn is the last one."""
    message = chat.messages[part.message]
    in_content = part.field == "content" and part.span != parts(part.text, chat.template.words)[-1]
    if message["role"] != ASSISTANT or not (in_content or part.field in THOUGHTS):
        return False
    later = (i for i, other in enumerate(chat.messages) if i > part.message and other["role"] == USER)
    turn = chat.messages[: next(later, 0)]
    return bool(turn) and _is_read(chat, turn, chat.render(turn), part)


def _left_out(chat: Conversation, part: Part) -> str:
    """Return what is wrong, and what to do, if the template leaves out a part."""
    message = chat.messages[part.message]
    place = f", message {part.message + 1}"
    if part.field == CALLS:
        number = f", call {part.item + 1}" if part.item else ""
        return f"{place}{number}: the chat template does not write its tool calls"
    if part.field != "content":
        advice = "remove it, or use a template that writes thoughts" if part.field in THOUGHTS else "remove it"
        return f"{place}: the chat template does not write `{part.field}`: {advice}"
    if len(parts(part.text, chat.template.words)) > 1:
        advice = "remove it, or use a template that writes it"
        return f"{place}: the chat template leaves out a part of its text, {_shown(part)}: {advice}"
    if message.get(CALLS):
        return f"{place}: the chat template does not write the text beside its tool calls: remove the text"
    return (
        f"{place}: the chat template does not write a message of role {message['role']} here: "
        "give it another role or place, or use a template that writes it"
    )


def _shown(part: Part) -> str:
    text = " ".join(part.text[slice(*part.span)].split())
    return f'"{text[:40]}..."' if len(text) > 43 else f'"{text}"'


def _require_values(chat: Conversation, text: str) -> None:
    """Require the values of tool calls' arguments that have no marks: numbers, true, false, null, and empty ones."""
    values = [*_values(chat.messages)]
    signs = dict(zip(_signs(text), values, strict=False))
    replaced = chat.messages
    for sign, (index, path) in signs.items():
        replaced = _replaced(replaced, index, path, sign)
    together = chat.render(replaced) or "" if values else ""
    for sign, (index, path) in signs.items():
        if sign not in together and chat.render(_replaced(chat.messages, index, path, sign)) == text:
            raise Unusable(f", message {index + 1}: the chat template does not write `{path[-1]}` of its tool calls")


def _values(messages: Sequence[JsonObject]) -> Iterator[tuple[int, Path]]:
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get(CALLS) or ()):
            path: Path = (CALLS, number, "function", "arguments")
            given = call.get("function", {}).get("arguments") if isinstance(call, dict) else None
            yield from ((index, (*path, *rest)) for rest in (_leaves(given) if isinstance(given, dict) else ()))


def _leaves(value: Any) -> Iterator[Path]:
    """Yield the paths of the values in an object or a list that get no marks."""
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, dict | list) and item:
            yield from ((name, *rest) for rest in _leaves(item))
        elif name in LINKS or not isinstance(item, str) or not item.strip():
            yield (name,)


# -- messages and roles ----------------------------------------------------------------------------------------


def _require_silent(chat: Conversation, text: str, index: int) -> None:
    """Require a message that says nothing; instructions that say nothing are none."""
    others = [*chat.messages[:index], *chat.messages[index + 1 :]]
    if chat.messages[index]["role"] not in _INSTRUCTIONS and chat.render(others) == text:
        raise Unusable(f", message {index + 1}: the chat template does not write an empty message: remove it")


def _require_name(chat: Conversation, text: str, index: int) -> None:
    name = _other(chat.messages[index]["name"])
    if chat.render(_replaced(chat.messages, index, ("name",), name)) == text:
        raise Unusable(f", message {index + 1}: the chat template does not write `name`: remove it")


def _require_role(chat: Conversation, text: str, index: int) -> None:
    """Require that the template writes a message otherwise than one of the user, or of the assistant."""
    message = chat.messages[index]
    around = chat.messages[max(0, index - 1) : index + 2]
    key = (index > 0, bool(message.get(CALLS)), bool(chat.tools), *(other["role"] for other in around))
    for other in (USER, ASSISTANT):
        alike = chat.template.roles.get((other, *key))
        if alike is None:
            alike = chat.render(_replaced(chat.messages, index, ("role",), other)) == text
            chat.template.roles[(other, *key)] = alike
        if alike:
            raise Unusable(
                f", message {index + 1}: the chat template writes role {message['role']} as it writes role {other}: "
                "use a template that tells them apart"
            )


# -- tools -----------------------------------------------------------------------------------------------------


def _require_tools(chat: Conversation, tools: list[JsonObject], text: str) -> None:
    """Require the names, descriptions and other texts of tools, and the names of their parameters."""
    if text == chat.render(chat.messages, tools=[]):
        raise Unusable(": the chat template does not write `tools`: remove them, or use a template that has them")
    signs: dict[str, Path] = {}
    free = _signs(text)

    def sign(path: Path, said: str) -> str:
        signs[character := next(free, "")] = path
        return said + character

    together = chat.render(chat.messages, tools=_rewritten(tools, sign)) or ""
    for character, path in signs.items():
        if character not in together and not _is_tool_read(chat, tools, text, path):
            raise Unusable(_unwritten_tool(tools, path))


def _is_tool_read(chat: Conversation, tools: list[JsonObject], text: str, path: Path) -> bool:
    """Return whether the template writes something else than `text` if a tool's text at `path` is another."""

    def longer(at: Path, said: str) -> str:
        return said + "x" if at == path else said

    return chat.render(chat.messages, tools=_rewritten(tools, longer)) != text


def _rewritten(value: Any, change: Callable[[Path, str], str], path: Path = ()) -> Any:
    """Return a tool's schema with its texts, and the names of its parameters, replaced by `change`."""
    if isinstance(value, str):
        return change(path, value) if value.strip() else value
    if isinstance(value, list):
        return [_rewritten(item, change, (*path, number)) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if path[-1:] == ("properties",):
        return {
            change((*path, name, ""), name): _rewritten(item, change, (*path, name)) for name, item in value.items()
        }
    return {
        name: item if name in _OF_A_SCHEMA else _rewritten(item, change, (*path, name)) for name, item in value.items()
    }


def _unwritten_tool(tools: list[JsonObject], path: Path) -> str:
    number = int(path[0])
    what = ".".join(str(key) for key in path[2:] if key != "")
    return (
        f": the chat template does not write `{what}` of tool {number + 1} ({tools[number]['function']['name']}): "
        "remove it, or use a template that writes it"
    )


# -- other values ----------------------------------------------------------------------------------------------


def _signs(text: str) -> Iterator[str]:
    """Yield characters that a text does not contain, and that no template escapes."""
    return (character for character in map(chr, TANGUT) if character not in text)


def _other(text: str) -> str:
    """Return a text of the same length with other letters and digits; a longer one if it has none."""
    moved = "".join(_NEXT.get(char, char) for char in text)
    return moved if moved != text else text + "x"


def _replaced(messages: Sequence[JsonObject], index: int, path: Path, value: object) -> list[JsonObject]:
    """Return the messages with another value at a path of one of them."""
    return [_with(message, path, value) if at == index else message for at, message in enumerate(messages)]


def _with(tree: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    if isinstance(tree, dict):
        return {**tree, path[0]: _with(tree[path[0]], path[1:], value)}
    return [_with(item, path[1:], value) if number == path[0] else item for number, item in enumerate(tree)]
