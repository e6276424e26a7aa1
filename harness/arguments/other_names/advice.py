"""What is said of a flag that there is not: whether it may stand without effect, else what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable

from harness.arguments.other_names.axolotl import asks_for_nothing
from harness.arguments.other_names.huggingface import NOT_TAKEN
from harness.arguments.other_names.other_programs import meant
from harness.config.schema.suggest import nearest

NOTHING = "nothing: "


def is_idle(name: str, value: object) -> bool:
    """Whether a flag of another program asks, with this value, for what is done in any case."""
    entry = NOT_TAKEN.get(name)
    if entry is None:
        return asks_for_nothing(name, value)
    return value is None or _plain(value) in map(_plain, entry.same)


def refusal(name: str, spelled: str, known: Iterable[str]) -> str:
    """Return what is wrong with the flag `name`, which is not one of `known`; the user wrote it as `spelled`."""
    what = f"{spelled} is not supported" if name in NOT_TAKEN else f"unknown flag {spelled}"
    return f"{what}: {advice(name, known)}"


def advice(name: str, known: Iterable[str]) -> str:
    """Return what to do instead of giving the flag `name`."""
    if name in NOT_TAKEN:
        return NOT_TAKEN[name].advice
    if found := meant(name):
        return "; or ".join(_instead(name, program, here) for program, here in found)
    close = nearest(name, known) or nearest(name, NOT_TAKEN)
    return f"did you mean --{close}?" if close else "see --help for all flags"


def _instead(name: str, program: str, here: str) -> str:
    """Return what to write for a flag that a program calls `name`; no program: several do, or none."""
    does = f"leave it out: {here.removeprefix(NOTHING)}" if here.startswith(NOTHING) else f"use {here}"
    return does + (f" ({program} calls it {name})" if program else "")


def _plain(value: object) -> str:
    """Return a value as text that is the same from Python, a config file and the command line."""
    text = (json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)).lower()
    try:
        return str(float(text))
    except ValueError:
        return text.replace(" ", "")
