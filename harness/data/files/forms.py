"""Rows of other programs' forms as conversations: ShareGPT's `conversations`, Alpaca's `instruction` and `output`.

Each becomes the messages that `rows.py` checks. Values are left as they are, so that what is wrong with them is
reported there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

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
        "function_call": "assistant",
    }
)
"""ShareGPT's names -> those of chat templates; others are the same."""


def from_sharegpt(turns: object, system: object = None) -> object:
    """Return ShareGPT's turns, {from, value}, as messages, after a system prompt that stands in a column of its own."""
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        return turns
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, *map(_message, turns)]


def _message(turn: object) -> object:
    if not isinstance(turn, Mapping) or "from" not in turn or turn.get("role") is not None:
        return turn
    rest = {name: value for name, value in turn.items() if name not in ("from", "value", "role")}
    return {"role": _ROLES.get(str(turn["from"]), turn["from"]), "content": turn.get("value"), **rest}


def from_alpaca(row: Mapping[str, object], place: str) -> list[dict[str, object]]:
    """Return Alpaca's instruction, with its input below it where there is one, and the output as messages.

    Before them come the turns of `history`, pairs of instruction and answer; UserError for another history.
    """
    asked, given = row["instruction"], row.get("input")
    if isinstance(asked, str) and isinstance(given, str) and given.strip():
        asked = f"{asked}\n\n{given}"
    system, turns = row.get("system"), row.get("history") or []
    messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise UserError(f"{place}: `history` is {type(turns).__name__}, not a list of [instruction, answer]")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise UserError(f"{place}: `history`, turn {number} is not a pair [instruction, answer]")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
