"""From words on the command line to dataclasses of flags."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn

from harness.arguments.config_file import ConfigFlag
from harness.arguments.flags import Flags, Help, groups, hints_of, shown_default
from harness.arguments.words import Known, config_flags, known_flags, own_words
from harness.config.values.typed import takes, typed
from harness.errors import UserError, UserErrors

_NAMES, _SEVERAL = re.compile(r"[\w.,\s-]*"), re.compile(r"[,\s]+")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UserErrors: one line, no usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def add_flags(parser: argparse.ArgumentParser, kind: type[Flags]) -> None:
    """Add a flag for each field, under the title of its theme: its type, default and the `help` of its metadata."""
    for group in groups(kind):
        _add_group(parser.add_argument_group(group.TITLE), group)


def _add_group(parser: argparse._ArgumentGroup, kind: type[Flags]) -> None:
    hints = hints_of(kind)
    for item in fields(kind):
        text, default = Help.of(item), shown_default(item)
        suffix = f" (default: {default})" if default else ""
        hint, name = hints[item.name], item.name
        add = partial(
            parser.add_argument, f"--{name}", default=argparse.SUPPRESS, help=text + suffix, metavar=name.upper()
        )
        if takes(hint, tuple):
            add(nargs="+", action="store" if text.paths else _Names)
        elif takes(hint, bool):
            add(type=partial(_typed, hint), nargs="?", const=True)
        else:
            add(type=partial(_typed, hint))


def parse(
    kinds: Sequence[type[Flags]], argv: Sequence[str] | None, *, prog: str, description: str, epilog: str
) -> tuple[Any, ...]:
    """Parse `argv` into one instance of each dataclass; UserError for what cannot be parsed."""
    parser = Parser(
        prog=prog,
        usage="%(prog)s --FLAG VALUE ...",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("--config", metavar="FILE", help="flags in a YAML or JSON file, or the run.json of a run")
    for kind in kinds:
        add_flags(parser, kind)
    known = known_flags(kinds)
    in_files, words = config_flags(sys.argv[1:] if argv is None else argv, known)
    given = _of_files(parser, in_files, known)
    given |= vars(parser.parse_args(own_words(words, known)))
    return tuple(kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given}) for kind in kinds)


def _of_files(parser: Parser, in_files: Sequence[ConfigFlag], known: Known) -> dict[str, object]:
    """Parse the flags of config files; UserErrors for all that cannot be used."""
    given: dict[str, object] = {}
    problems = []
    for item in in_files:
        try:
            given |= vars(parser.parse_args(own_words(item.words, known)))
        except UserError as error:
            problems.append(f"{item.where}{error}")
    if problems:
        raise UserErrors("\n".join(problems))
    return given


def expanded(kinds: Sequence[type[Flags]], words: Sequence[str]) -> list[str]:
    """Return the words with the flags of `--config FILE` in its place, and with the harness's own names."""
    known = known_flags(kinds)
    in_files, rest = config_flags(words, known)
    return [*(word for item in in_files for word in own_words(item.words, known)), *own_words(rest, known)]


def _typed(hint: object, text: str) -> object:
    try:
        return typed(hint, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is {error}") from error


class _Names(argparse.Action):
    """Several names, separated by spaces or commas, as a tuple; a regular expression stays whole."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        _option_string: str | None = None,
    ) -> None:
        words = [_SEVERAL.split(value) if _NAMES.fullmatch(value) else [value] for value in values or ()]
        setattr(namespace, self.dest, tuple(name for several in words for name in several if name))
