"""The command line of `ds-harness` and of the training script, with the same rules for every flag."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, get_type_hints

from harness import completion
from harness.config.values.arguments import BETAS, FP8, LEAST, SCHEDULES, AutoValues
from harness.config.values.paths import usable_path
from harness.config.values.typed import FALSE, TRUE, takes, typed
from harness.errors import one_line, printable
from harness.optimizers import FLAGS

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

LARGEST = 10**7  # of any size
DIGITS = re.compile(r"[+-]?[0-9]{1,20}")
ActionT = TypeVar("ActionT", bound=argparse.Action)
_CHOICES = {"fp8": FP8, "optim": tuple(FLAGS), "lr_scheduler_type": SCHEDULES}


def integer(text: str) -> int:
    """Return a whole number, given as an argument in decimal digits: not in Python's own ways to write one."""
    if not DIGITS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"invalid int value: {text[:80]!r}")
    return int(text)


def whole_number(text: str, *, least: int = 0, most: int = LARGEST) -> int:
    """Return a whole number from `least` to `most`, given as an argument in decimal digits."""
    if not re.fullmatch(r"[+-]?[0-9]+", text) or (value := int(text[:21])) < least:  # however many digits it has
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"must be at most {most:,}")
    return value


positive = partial(whole_number, least=1)


def path_argument(text: str) -> Path:
    """Return the path that an argument gives, of a file that exists or not."""
    if not text:  # as of a variable of the shell that is not set; to Python it is the working directory
        raise argparse.ArgumentTypeError("must not be empty; the working directory is `.`")
    try:
        return usable_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{printable(text[:80])}: no file can have this name: {error}") from error


def name_or_path(text: str) -> str:
    """Return an argument that may be a path, or a name: of a preset, a device, an id of the hub."""
    path_argument(text)
    return text


def argument_in_type(hint: object, text: str) -> object:
    """Return the value of a flag in the type of its field, as argparse wants it."""
    try:
        return typed(hint, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is {error}") from error


number = partial(argument_in_type, float)


def with_default(text: str, default: object) -> str:
    """Return the help of an argument with its default, if it has one and the text does not say it."""
    if default in (None, "", argparse.SUPPRESS) or default is False or "default:" in text:
        return text
    shown = f"{default:g}" if isinstance(default, float) else str(default).replace("%", "%%")
    return f"{text} (default: {shown})".lstrip()


class Boolean(argparse.Action):
    """The action of every boolean flag: it stands alone, or takes true or false; without it, it is False.

    `hint`: the type of a flag that takes words, too; `words` are these.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        *,
        default: object = False,
        help: str | None = None,
        hint: object = bool,
        words: Sequence[str] = (),
        **_: object,
    ) -> None:
        kind = partial(argument_in_type, hint)
        shown = "|".join(("true", "false", *words))
        super().__init__(
            option_strings, dest, nargs="?", const=True, default=default, type=kind, help=help, metavar=shown
        )
        self.words = tuple(words)

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, value: object, _option_string: str | None = None
    ) -> None:
        """Set the flag."""
        setattr(namespace, self.dest, value)


class FlagParser(argparse.ArgumentParser):
    """Reads flags: dashes equal underscores; a boolean is written `--NAME`, `--NAME true|false` or `--no_NAME`.

    Attributes:
        joins_values: whether `true` or `false` behind a boolean is its value; else only `--NAME=true` gives one.
    """

    joins_values = True

    def _add_action(self, action: ActionT) -> ActionT:
        """Add an argument; its help says its default."""
        if action.help is not argparse.SUPPRESS:
            action.help = with_default(action.help or "", action.default)
        return super()._add_action(action)

    def parse_known_args(  # type: ignore[override]  # its overloads differ in the type of the namespace alone
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words, each flag under the name that it was added with."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(self.spelled(words), namespace)

    def spelled(self, words: Sequence[str]) -> list[str]:
        """Return the words with the flags' own names, and a boolean's value in the same word, as `--NAME=true`.

        A boolean that stands alone would otherwise take the next word, such as a file, for its value.
        """
        flags = {name.replace("-", "_"): (name, action) for name, action in self._option_string_actions.items()}
        has_positionals = self._has_positionals()
        kept: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--":
                return [*kept, word, *rest]
            plain, equals, value = word.partition("=")
            plain = plain.replace("-", "_")
            if plain not in flags and self.allow_abbrev and plain.startswith("__"):
                begun = [name for name in flags if name.startswith(plain)]
                plain = begun[0] if len(begun) == 1 else plain
            following = rest[0].lower() if self.joins_values and rest else ""
            follows = following in TRUE + FALSE
            positive = plain.replace("__no_", "__", 1)
            if plain in flags:
                name, action = flags[plain]
                if isinstance(action, Boolean) and not equals:
                    follows = follows or following in action.words
                    if follows or has_positionals:
                        equals = "="
                        value = rest.pop(0) if follows else "true"
                kept.append(name + equals + value)
            elif plain.startswith("__no_") and positive in flags and isinstance(flags[positive][1], Boolean):
                name = flags[positive][0]
                if equals or (follows and not has_positionals):
                    self.error(f"{word} takes no value: give {name} true or false")
                kept.append(f"{name}=false")
            else:
                kept.append(word)
        return kept

    def _has_positionals(self) -> bool:
        return any(not action.option_strings for action in self._actions)


class VerbParser(FlagParser):
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

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help, or complete the line of the shell that asks for it."""
        if completion.is_asked():
            completion.complete(self, has_positionals=self._has_positionals())
        super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Say what cannot be used, and end."""
        self.exit(2, f"{self.prog}: {one_line(message)} (see --help)\n")

    def parted(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the words of this parser's flags with their values, and all others; for a parser without positionals.

        argparse's own `parse_known_args` returns the others alone.
        """
        known: list[str] = []
        others: list[str] = []
        rest = iter(self.spelled(words))
        for word in rest:
            name, equals, _ = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is None:
                others.append(word)
                continue
            known.append(word)
            if not (equals or action.nargs == 0 or isinstance(action, Boolean)):
                known += islice(rest, 1)
        return known, others

    def add_run_arguments(self, names: Iterable[str]) -> None:
        """Add arguments of a run to which a config may leave a value; a boolean stands alone or takes true or false."""
        hints = get_type_hints(AutoValues)
        defaults = {item.name: item.default for item in fields(AutoValues)}
        for name in names:
            hint = hints[name]
            default = defaults[name]
            text = with_default("as in a run", default)
            if takes(hint, bool):
                self.add_argument(f"--{name}", action=Boolean, default=None, help=text)
                continue
            kind = positive if name.endswith("_size") else partial(_as_in_a_run, name, hint)
            self.add_argument(f"--{name}", type=kind, help=text, choices=_CHOICES.get(name))


def _as_in_a_run(name: str, hint: object, text: str) -> object:
    """Return the value of an argument of a run in its type; a value that a run would refuse is refused here too."""
    value = argument_in_type(hint, text)
    if isinstance(value, float) and not isfinite(value):
        raise argparse.ArgumentTypeError("must be a finite number")
    if isinstance(value, int | float) and value < LEAST.get(name, value):
        raise argparse.ArgumentTypeError(f"must be at least {LEAST[name]}")
    if name in BETAS and isinstance(value, int | float) and value >= 1:
        raise argparse.ArgumentTypeError("must be below 1")
    return value


def run_arguments(args: argparse.Namespace, **known: int) -> AutoValues:
    """Return the arguments of a run that a verb was given; `known` is what the verb knows without the user."""
    names = {item.name for item in fields(AutoValues)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    return AutoValues(**{**given, **known}, given=frozenset(given))
