"""Look up flags of other programs, and what to write here instead, in the table `other_programs.json`.

The table has four sections. `huggingface`: flags of TrainingArguments and run_clm.py that do not exist here, with the
values (`same`) that ask for the behaviour the harness always has. `programs`: flags of other programs, by program (""
for words that several use). A switch of axolotl's that is false asks for nothing, unless it `acts_if_false`.
`beginnings`: prefixes of further flags of a program. `launch`: flags of the `deepspeed` command and of torchrun that
`ds-harness launch` refuses, or takes and ignores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.spelling import nearest

NOTHING = "nothing: "


@dataclass(frozen=True)
class NotTaken:
    """A HuggingFace flag that does not exist here. None, HuggingFace's "not set", is always accepted.

    Attributes:
        advice: what to do instead, or why it cannot be done.
        same: values with which the flag would have no effect here; they are accepted.
        taken: other values are accepted too, with `advice` as a note: they change nothing that is trained.
    """

    advice: str
    same: tuple[object, ...] = ()
    taken: bool = False


@dataclass(frozen=True)
class OtherPrograms:
    """The table.

    Attributes:
        not_taken: HuggingFace flags that do not exist here, by name.
        programs: program -> its flag -> what to write here.
        beginnings: program -> prefix of its flags -> what to write here.
        acts_if_false: flags that ask for something if they are false.
        refused_by_launch: flag of another launcher -> what to do instead.
        ignored_by_launch: names of a flag of another launcher -> its values: some, "any" or "true or false".
    """

    not_taken: Mapping[str, NotTaken]
    programs: Mapping[str, Mapping[str, str]]
    beginnings: Mapping[str, Mapping[str, str]]
    acts_if_false: frozenset[str]
    refused_by_launch: Mapping[str, str]
    ignored_by_launch: Mapping[tuple[str, ...], Sequence[str] | str]


@cache
def other_programs() -> OtherPrograms:
    """Read the table."""
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    by_program: dict[str, dict[str, dict[str, str]]] = {
        section: {
            program: {flag: row["instead"] for row in rows for flag in row["flags"]}
            for program, rows in content[section].items()
        }
        for section in ("programs", "beginnings")
    }
    not_taken = {
        flag: NotTaken(row["advice"], tuple(row["same"]), row.get("taken", False))
        for row in content["huggingface"]
        for flag in row["flags"]
    }
    rows = [row for rows in content["programs"].values() for row in rows if row.get("acts_if_false")]
    return OtherPrograms(
        not_taken=not_taken,
        programs=by_program["programs"],
        beginnings=by_program["beginnings"],
        acts_if_false=frozenset(flag for row in rows for flag in row["flags"]),
        refused_by_launch={flag: row["instead"] for row in content["launch"]["refused"] for flag in row["flags"]},
        ignored_by_launch={tuple(row["flags"]): row["takes"] for row in content["launch"]["ignored"]},
    )


def is_idle(name: str, value: object) -> bool:
    """Return whether another program's flag, with this value, asks only for what the harness always does."""
    entry = other_programs().not_taken.get(name)
    if entry is not None:
        return entry.taken or _is_same(entry, value)
    known = name in other_programs().programs["axolotl"] or name.startswith(
        tuple(other_programs().beginnings["axolotl"])
    )
    return known and str(value).lower() == "false" and name not in other_programs().acts_if_false


def notes(given: Mapping[str, object]) -> list[str]:
    """Return a line for each HuggingFace argument that was accepted and changes nothing, although it asks for more."""
    entries = ((name, value, other_programs().not_taken.get(name)) for name, value in given.items())
    return [f"{name}: {entry.advice}" for name, value, entry in entries if entry and not _is_same(entry, value)]


def _is_same(entry: NotTaken, value: object) -> bool:
    return value is None or _plain(value) in map(_plain, entry.same)


def is_section(name: str) -> bool:
    """Return whether torchtitan's config files have a section of that name, whose keys are flags `NAME.KEY`."""
    return any(flag.startswith(f"{name}.") for flag in other_programs().programs["torchtitan"])


def refusal(name: str, spelled: str, known: Iterable[str]) -> str:
    """Return the error text for the flag `name`, which is not in `known`; the user wrote it as `spelled`."""
    is_known = name in other_programs().not_taken
    return f"{f'{spelled} is not supported' if is_known else f'unknown flag {spelled}'}: {advice(name, known)}"


def advice(name: str, known: Iterable[str]) -> str:
    """Return what to write instead of the flag `name`."""
    not_taken = other_programs().not_taken
    if name in not_taken:
        return not_taken[name].advice
    if found := meant(name):
        return "; or ".join(_instead(name, program, here) for program, here in found)
    close = nearest(name, known) or nearest(name, not_taken)
    return f"did you mean --{close}?" if close else "see --help for all flags"


def meant(name: str) -> list[tuple[str, str]]:
    """Return (program, what to write here) for programs with a flag `name`, merged where the advice is equal."""
    plain = name.lower().replace("-", "_")
    programs: dict[str, list[str]] = {}
    for program, names in other_programs().programs.items():
        if plain in names:
            programs.setdefault(names[plain], []).append(program)
    if programs:
        return [(" and ".join(filter(None, several)), here) for here, several in programs.items()]
    for program, names in other_programs().beginnings.items():
        for start, here in names.items():
            if plain.startswith(start):
                return [(program, here)]
    return []


def _instead(name: str, program: str, here: str) -> str:
    """Return the advice for a flag that `program` calls `name`; "" if several programs do, or none."""
    does = f"leave it out: {here.removeprefix(NOTHING)}" if here.startswith(NOTHING) else f"use {here}"
    return does + (f" ({program} calls it {name})" if program else "")


def _plain(value: object) -> str:
    """Return a value as text that is equal for Python, a config file and the command line: 1, 1.0 and "1.0"."""
    text = (json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)).lower()
    try:
        return str(float(text))
    except ValueError:
        return text.replace(" ", "")
