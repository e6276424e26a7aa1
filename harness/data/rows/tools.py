"""Bring tools and tool calls into the form in which a server hands them to a chat template, OpenAI's.

A tool is {type: function, function: {name, description, parameters}}, a call {type: function, function: {name,
arguments}}. Data sets also have them flat, as JSON text, or as a turn of their own (ShareGPT). Trained in such a form,
a template would write other tokens than it does at inference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from harness.config.values.json_object import JsonObject
from harness.errors import UserError

_FUNCTION = "function"
_OF_A_CALL = ("name", "arguments")
_AROUND_A_CALL = ("type", "id", "index", _FUNCTION)


def tool_schemas(tools: object, location: str) -> list[JsonObject]:
    """Return descriptions of tools from a list, a list as JSON text, or a list of JSON texts. UserError for others."""
    return _each(tools, _schema, location, "tool")


def _schema(given: object, location: str) -> JsonObject:
    tool = parsed(given, location)
    if not isinstance(tool, Mapping):
        raise UserError(f"{location} is {type(tool).__name__}, not an object: give its JSON schema")
    nested = isinstance(tool.get(_FUNCTION), Mapping)
    function = {**(tool[_FUNCTION] if nested else {name: tool[name] for name in tool if name != "type"})}
    if not isinstance(function.get("name"), str) or tool.get("type", _FUNCTION) != _FUNCTION:
        raise UserError(
            f"{location} is not a function with a name: give {{type: function, function: {{name, description, "
            "parameters}}"
        )
    if "input_schema" in function:  # Anthropic's name
        schema = function.pop("input_schema")
        function.setdefault("parameters", schema)
    return {"type": _FUNCTION, **tool, _FUNCTION: function} if nested else {"type": _FUNCTION, _FUNCTION: function}


def tool_calls(calls: object, location: str) -> list[JsonObject]:
    """Return the tool calls of a message, from a list or its JSON text, flat or nested; [] for none.

    Arguments stay an object or JSON text, as they were given. Raises UserError for anything else.
    """
    return _each(calls, _call, location, "call")


def calls_of_turn(value: object, location: str) -> list[JsonObject]:
    """Return the calls of ShareGPT's turn `function_call`: JSON text of one call, {name, arguments}, or of a list."""
    found = parsed(value, location)
    calls = tool_calls([found] if isinstance(found, Mapping) else found, location)
    if not calls:
        raise UserError(f"{location} holds no call: give the JSON text of {{name, arguments}}")
    return calls


def _each(given: object, convert: Callable[[object, str], JsonObject], location: str, what: str) -> list[JsonObject]:
    """Convert each item of a list, or of its JSON text; [] for none. UserError for anything else than a list."""
    items = parsed(given, location)
    if not items:
        return []
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise UserError(f"{location} is {type(items).__name__}, not a list of {what}s")
    return [convert(item, f"{location}, {what} {number}") for number, item in enumerate(items, start=1)]


def _call(given: object, location: str) -> JsonObject:
    call = parsed(given, location)
    if not isinstance(call, Mapping):
        raise UserError(f"{location} is {type(call).__name__}, not an object: give {{name, arguments}}")
    around = dict(call)
    if not isinstance(around.get(_FUNCTION), Mapping):  # it is flat
        around[_FUNCTION] = {name: around.pop(name) for name in _OF_A_CALL if name in around}
    function = around[_FUNCTION]
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise UserError(f"{location} has no `name` of a function: give {{name, arguments}}")
    for found, known in ((around, _AROUND_A_CALL), (function, _OF_A_CALL)):
        if unknown := next((name for name in found if name not in known), None):
            raise UserError(f"{location} has `{unknown}`, which a call does not have: give {{name, arguments}}")
    function = {"name": function["name"], "arguments": _arguments(function.get("arguments"), location)}
    return {"type": _FUNCTION, **around, _FUNCTION: function}


def _arguments(given: object, location: str) -> object:
    """Return arguments as they are; {} for none. UserError unless they are an object, or the JSON text of one."""
    found = parsed(given, f"{location}: `arguments`")
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise UserError(f"{location}: `arguments` are {type(found).__name__}, not an object: name each of them")
    return given


def parsed(value: object, location: str) -> object:
    """Return a value that may be given as JSON text, parsed; None for a blank text. UserError for invalid JSON."""
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return json.loads(value, object_pairs_hook=with_unique_names)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location} is a text that is not JSON ({error})") from error


def with_unique_names(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Build a dict from the pairs of a JSON object. ValueError for a repeated name: json would keep the last value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} occurs twice in an object")
    return made
