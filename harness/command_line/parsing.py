"""Parse a command line into dataclasses of flags.

Dashes equal underscores; `--no_NAME` means `--NAME false`; `--config FILE` means the flags in that file. A flag of
HuggingFace's that asks for the behaviour the harness always has is dropped (`--ddp_timeout 1800`); any other unknown
flag is refused with the flag to use instead.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from typing import Any, NoReturn

from harness.arguments.precision import computes_in_bf16, is_auto
from harness.arguments.themes.flags import ALIASES, Flags, Help, default_of, flags_of, groups, require_one_name
from harness.command_line.config_file import ConfigFlag, read_config_file
from harness.command_line.other_programs import is_idle, other_programs, refusal
from harness.completion import propose
from harness.config.values.json_object import JsonObject
from harness.config.values.typed import takes
from harness.errors import UserError, UserErrors, refuse_all
from harness.verb_parser import Boolean, FlagParser, argument_in_type, whole_number, with_default

_NOT_FLAGS = {"local_rank", "help", "h", "config"}  # local_rank: DeepSpeed's launcher adds it
Known = Mapping[str, Field[object]]
_NAMES = re.compile(r"[\w.,\s-]*")
_SEVERAL = re.compile(r"[,\s]+")


class Parser(FlagParser):
    """An argument parser whose errors are UserErrors: one line, no usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def add_flags(parser: argparse.ArgumentParser, kind: type[Flags]) -> None:
    """Add a flag for each field of a dataclass, grouped by theme, with its type, default and help."""
    for group in groups(kind):
        _add_group(parser.add_argument_group(group.TITLE), group)


def shown_default(item: Field[object]) -> str:
    """Return a flag's default as text for the user; "" without a default."""
    default = default_of(item)
    if isinstance(default, list):
        return " ".join(map(str, default))
    return "" if default is None or default is MISSING else str(default)


def _add_group(parser: argparse._ArgumentGroup, kind: type[Flags]) -> None:
    for name, (item, hint) in flags_of(kind).items():
        text = Help.of(item)
        shown = with_default(text, shown_default(item))
        add = partial(parser.add_argument, f"--{name}", default=argparse.SUPPRESS, help=shown, metavar=name.upper())
        if takes(hint, list):
            add(nargs="+", action="store" if text.paths else _Names)
        elif takes(hint, bool):
            add(action=Boolean, hint=hint, words=text.choices)
        else:
            action = add(type=partial(argument_in_type, hint))
            if text.choices:
                propose(action, text.choices)


def parse(
    kinds: Sequence[type[Flags]], argv: Sequence[str] | None, *, prog: str, description: str, epilog: str
) -> tuple[Any, ...]:
    """Parse `argv` into one instance of each dataclass.

    Flags of the command line override those of `--config` files. Raises UserError for words that cannot be parsed.
    """
    parser = Parser(
        prog=prog,
        usage="%(prog)s --FLAG VALUE ...",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--local_rank", type=whole_number, default=0, help=argparse.SUPPRESS
    )  # the deepspeed launcher adds it
    parser.add_argument("--config", metavar="FILE", help="flags in a YAML or JSON file, or the run.json of a run")
    for kind in kinds:
        add_flags(parser, kind)
    known = known_flags(kinds)
    in_files, words = config_flags(sys.argv[1:] if argv is None else argv, known)
    given = _of_files(parser, in_files, known)
    given |= vars(parser.parse_args(own_words(words, known)))
    idle = _without_effect([*(word for item in in_files for word in item.words), *words])
    return tuple(
        kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given}, _without_effect=idle) for kind in kinds
    )


def _without_effect(words: Sequence[str]) -> dict[str, str]:
    """Return HuggingFace's flags among the words that exist only for scripts of others, with their values."""
    found = {}
    for name, value in map(_name_and_value, _flags(words)):
        if name in other_programs().not_taken:
            found[name] = value
    return found


def _name_and_value(flag: Sequence[str]) -> tuple[str, str]:
    """Return a flag's name without dashes, and its value; "true" without one."""
    name, equals, value = flag[0].partition("=")
    return name.removeprefix("--").replace("-", "_"), value if equals else " ".join(flag[1:] or ["true"])


def _of_files(parser: Parser, in_files: Sequence[ConfigFlag], known: Known) -> JsonObject:
    """Parse the flags of config files. Raises UserErrors with one line for each flag that cannot be used."""
    given: JsonObject = {}
    problems = []
    for item in in_files:
        try:
            given |= vars(parser.parse_args(own_words(item.words, known)))
        except UserError as error:
            problems.append(f"{item.where}{error}")
    if problems:
        raise UserErrors(*problems)
    return given


def expanded(kinds: Sequence[type[Flags]], words: Sequence[str]) -> list[str]:
    """Replace `--config FILE` by the flags in the file, and aliases by the harness's names. UserError as `parse`."""
    known = known_flags(kinds)
    in_files, rest = config_flags(words, known)
    return [*(word for item in in_files for word in own_words(item.words, known)), *own_words(rest, known)]


class _Names(argparse.Action):
    """Collects names separated by spaces or commas into a list; a word with other characters (a regex) stays whole."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        _option_string: str | None = None,
    ) -> None:
        words = [_SEVERAL.split(value) if _NAMES.fullmatch(value) else [value] for value in values or ()]
        setattr(namespace, self.dest, [name for several in words for name in several if name])


def known_flags(kinds: Sequence[type[Flags]]) -> dict[str, Field[object]]:
    """Return the flags of several dataclasses by name."""
    return {item.name: item for kind in kinds for item in fields(kind)}


def config_flags(words: Sequence[str], known: Known) -> tuple[list[ConfigFlag], list[str]]:
    """Split words into the flags of `--config` files and the other words. UserError if a file cannot be read."""
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
    """Return the words with aliases replaced by the harness's names, without flags that have no effect.

    Raises UserError for unknown flags (all of them at once), and for a flag that is given under two names.
    """
    kept: list[str] = []
    names: dict[str, str] = {}
    problems: list[str] = []
    for flag in _flags(words):
        name, equals, value = flag[0].partition("=")
        spelled, given = _name_and_value(flag)
        plain = spelled
        if not name.startswith("--") or plain in _NOT_FLAGS:
            kept += flag
            continue
        # `--deepspeed FILE` is HuggingFace's deepspeed_config; a bare `--deepspeed` is DeepSpeed's own on-switch.
        plain = ALIASES.get(plain, plain) if given != "true" or plain != "deepspeed" else plain
        negated = plain.removeprefix("no_")
        negated = ALIASES.get(negated, negated)
        if plain in known:
            require_one_name(names, plain, f"--{spelled}")
            if is_auto(plain, given):
                flag = [name]
                equals = "="
                value = str(computes_in_bf16())
            kept += [f"--{plain}{equals}{value}", *flag[1:]]
        elif plain != negated and negated in known and takes(known[negated].type, bool):
            require_one_name(names, negated, f"--{spelled.removeprefix('no_')}")
            kept += [f"--no_{negated}{equals}{value}", *flag[1:]]  # the parser reads it, and refuses a value
        elif not _may_stand(plain, negated, given):
            problems.append(refusal(plain, name, known))
    refuse_all(problems)
    return kept


def _may_stand(name: str, negated: str, given: str) -> bool:
    """Return whether an unknown flag may be ignored because it has no effect, such as a bare `--deepspeed`."""
    if name == "deepspeed" or is_idle(name, given):
        return True
    return name != negated and is_idle(negated, "false")


def _flags(words: Sequence[str]) -> list[list[str]]:
    """Group words by flag: each group is a flag and the values behind it."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return found
