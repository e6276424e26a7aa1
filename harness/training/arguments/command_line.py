"""From words on the command line to dataclasses of flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_type_hints

from harness.errors import UserError
from harness.training.arguments.flags import Flags, groups


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UserErrors: one line, no usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def add_flags(parser: argparse.ArgumentParser, kind: type[Flags]) -> None:
    """Add a flag for each field, under the title of its theme: its type, default and the `help` of its metadata."""
    for group in groups(kind):
        _add_group(parser.add_argument_group(group.TITLE), group)


def _add_group(parser: argparse._ArgumentGroup, kind: type[Flags]) -> None:
    hints = get_type_hints(kind)
    for item in fields(kind):
        default = None if item.default is MISSING else item.default
        text = item.metadata["help"].replace("%", "%%")
        suffix = "" if default is None else f" (default: {default})"
        convert = _converter(hints[item.name])
        extra: dict[str, Any] = {"nargs": "?", "const": True} if convert is _boolean else {}
        if "tuple" in str(hints[item.name]):
            extra = {"nargs": "+", "action": _Names}
        parser.add_argument(
            f"--{item.name}",
            type=convert,
            default=argparse.SUPPRESS,
            help=text + suffix,
            metavar=item.name.upper(),
            **extra,
        )


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
    for kind in kinds:
        add_flags(parser, kind)
    given = vars(parser.parse_args(argv))
    return tuple(kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given}) for kind in kinds)


class _Names(argparse.Action):
    """Several words, separated by spaces or commas, as a tuple."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        _option_string: str | None = None,
    ) -> None:
        names = tuple(name for value in values for name in value.split(",") if name)
        setattr(namespace, self.dest, names)


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is not true or false")


def _converter(hint: object) -> Callable[[str], object]:
    names = str(hint)
    for kind, convert in (("bool", _boolean), ("float", float), ("int", int)):
        if kind in names or hint is convert:
            return convert
    return str
