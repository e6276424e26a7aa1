"""The command line of a verb of `ds-harness`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from typing import NoReturn, get_type_hints

from harness.config.values.arguments import OPTIMIZERS, AutoValues
from harness.config.values.typed import takes, typed

LARGEST = 10**7  # of any size


def positive(text: str) -> int:
    """Return a whole number of at least 1, given as an argument."""
    if not text.isdecimal() or int(text[:20]) < 1:
        raise argparse.ArgumentTypeError("must be a whole number of at least 1")
    if len(text) > len(str(LARGEST)) or int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST:,}")
    return int(text)


def argument_in_type(hint: object, text: str) -> object:
    """Return the value of a flag in the type of its field, as argparse wants it."""
    try:
        return typed(hint, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is {error}") from error


class VerbParser(argparse.ArgumentParser):
    """Reads a verb's arguments; unusable ones are one line on standard error, and exit code 2.

    Args:
        example: for the end of --help.
    """

    def __init__(
        self, verb: str, description: str, example: str = "", *, usage: str | None = None, allow_abbrev: bool = True
    ) -> None:
        super().__init__(
            prog=f"ds-harness {verb}",
            description=description,
            epilog=example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=usage,
            allow_abbrev=allow_abbrev,
        )

    def error(self, message: str) -> NoReturn:
        """Say what cannot be used, and end."""
        self.exit(2, f"{self.prog}: {message} (see --help)\n")

    def add_run_arguments(self, names: Iterable[str]) -> None:
        """Add arguments of a run to which a config may leave a value; a boolean stands alone or takes true or false."""
        hints, defaults = get_type_hints(AutoValues), {item.name: item.default for item in fields(AutoValues)}
        for name in names:
            hint, default = hints[name], defaults[name]
            add = partial(
                self.add_argument,
                f"--{name}",
                type=positive if name.endswith("_size") else partial(argument_in_type, hint),
                help="as in a run" + ("" if default is None else f" (default: {default})"),
            )
            if takes(hint, bool):
                add(nargs="?", const=True, metavar="true|false")
            else:
                add(choices=tuple(OPTIMIZERS) if name == "optim" else None)


def run_arguments(args: argparse.Namespace, **known: int) -> AutoValues:
    """Return the arguments of a run that a verb was given; `known` is what the verb knows without the user."""
    names = {item.name for item in fields(AutoValues)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    return AutoValues(**{**given, **known}, given=frozenset(given))
