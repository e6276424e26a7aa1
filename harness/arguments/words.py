"""The words of a command line, brought to the harness's own flags before they are parsed.

Dashes stand for underscores, `--no_NAME` for a boolean `--NAME false`, `--config FILE` for the flags in it. A flag of
HuggingFace's that asks for what is done anyway is dropped; any other unknown flag is refused with what to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields

from harness.arguments.config_file import ConfigFlag, read_config_file
from harness.arguments.flags import ALIASES, Flags, require_one_name
from harness.arguments.other_programs import advice, is_idle, refusal
from harness.config.values.typed import takes
from harness.errors import UserError, refuse_all

LAUNCHER = {"local_rank", "help", "h", "config"}  # local_rank: DeepSpeed's launcher adds it

Known = Mapping[str, Field[object]]


def known_flags(kinds: Sequence[type[Flags]]) -> dict[str, Field[object]]:
    """Return the flags of several dataclasses by name."""
    return {item.name: item for kind in kinds for item in fields(kind)}


def config_flags(words: Sequence[str], known: Known) -> tuple[list[ConfigFlag], list[str]]:
    """Return the flags of `--config FILE`, and the words without it; flags of the words win over those."""
    files, rest, follows = [], [], False
    for word in words:
        name, equals, value = word.partition("=")
        if follows or (name == "--config" and equals):
            files.append(word if follows else value)
            follows = False
        elif name == "--config":
            follows = True
        else:
            rest.append(word)
    if follows:
        raise UserError("--config: give a file, YAML or JSON")
    found = [flag for file in files for flag in read_config_file(file, known)]
    return found, rest


def own_words(words: Sequence[str], known: Known) -> list[str]:
    """Return the words with the harness's names. UserError for an unknown flag, and for one under two names."""
    kept: list[str] = []
    names: dict[str, str] = {}
    problems: list[str] = []
    for flag in _flags(words):
        name, equals, value = flag[0].partition("=")
        plain = spelled = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or plain in LAUNCHER:
            kept += flag
            continue
        given = value if equals else " ".join(flag[1:]) if flag[1:] else "true"
        plain = ALIASES.get(plain, plain) if given != "true" or plain != "deepspeed" else plain
        negated = plain.removeprefix("no_")
        negated = ALIASES.get(negated, negated)
        if plain in known:
            require_one_name(names, plain, f"--{spelled}")
            kept += [f"--{plain}{equals}{value}", *flag[1:]]
        elif plain != negated and negated in known and takes(known[negated].type, bool):
            if given != "true":
                raise UserError(f"{name} {given}: takes no value: give --{negated} true or false")
            require_one_name(names, negated, f"--{spelled.removeprefix('no_')}")
            kept.append(f"--{negated}=false")
        elif not _may_stand(plain, negated, given):
            problems.append(refusal(plain, name, known))
    refuse_all(problems)
    return kept


def own_arguments(given: Mapping[str, object], items: Iterable[Field[object]]) -> dict[str, object]:
    """Return keyword arguments with the harness's names. UserError for an unknown one, and for one under two names."""
    known = {item.name for item in items}
    kept: dict[str, object] = {}
    names: dict[str, str] = {}
    problems: list[str] = []
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own == "resume_from_checkpoint" and isinstance(value, bool):  # as in HuggingFace
            value = str(value)
        if own in known and value is not None:
            require_one_name(names, own, name)
            kept[own] = value
        elif own not in known and not is_idle(name, value):
            problems.append(f"TrainingArguments takes no {name}: {advice(name, known)}")
    refuse_all(problems)
    return kept


def _may_stand(name: str, negated: str, given: str) -> bool:
    """Whether an unknown flag has no effect; a bare `--deepspeed` is what DeepSpeed's own scripts want."""
    if name == "deepspeed" or is_idle(name, given):
        return True
    return name != negated and is_idle(negated, "false")


def _flags(words: Sequence[str]) -> list[list[str]]:
    """Return each flag with the words that follow it."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return found
