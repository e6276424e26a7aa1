"""What a flag is: a field of a dataclass, with its help and the values that it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import ClassVar, Self, TypeVar, get_type_hints

from harness.arguments.values import typed
from harness.errors import UserError, refuse_all

T = TypeVar("T")

ALIASES = {
    "deepspeed": "deepspeed_config",
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
}
"""Other names that flags have, as in HuggingFace."""


def flag(
    default: T,
    text: str,
    *,
    least: float | None = None,
    choices: Sequence[str] = (),
    paths: bool = False,
    hf_only: bool = False,
) -> T:
    """Return the field of a flag.

    Args:
        text: what `--help` says.
        least: the smallest value.
        choices: the only values.
        paths: of several words, that they are paths: a comma in one is a part of it.
        hf_only: it acts on HuggingFace models alone, and is refused for a list of layers.
    """
    about = {"help": text, "least": least, "choices": tuple(choices), "paths": paths, "hf_only": hf_only}
    return field(default=default, metadata=about)


def require_one_name(names: dict[str, str], own: str, name: str, where: str = "") -> None:
    """Note in `names` by which name a flag is given. UserError if it was given by another one before."""
    if (other := names.setdefault(own, name)) != name:
        raise UserError(f"{where}{other} and {name} are the same flag: give one of them")


def shown_default(item: Field[object]) -> str:
    """Return a flag's default for the user; empty without one."""
    default = None if item.default is MISSING else item.default
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return "" if default is None else str(default)


@dataclass(kw_only=True)
class Flags:
    """Flags of one theme, or of several: a class derived from other `Flags` has theirs.

    Attributes:
        TITLE: the theme, a heading in `--help` and in the docs.
        given: names of the flags that were passed, whatever their values; None is none.
    """

    TITLE: ClassVar[str] = ""
    _asked: ClassVar[frozenset[str]] = frozenset()  # set on each instance, which calls it _given once it is made

    def __new__(cls, *_: object, **given: object) -> Self:
        self = super().__new__(cls)
        if given:
            object.__setattr__(self, "_asked", asked_for(cls, given))
        return self

    def __setattr__(self, name: str, value: object) -> None:
        """Set a flag; one that is set later is checked as the others are, and counts as given."""
        if "_given" in vars(self):
            hints = hints_of(type(self))
            item = next((item for item in fields(self) if item.name == name), None)
            if item is not None:
                given, value = frozenset() if value is None else {name}, _allowed(item, hints[name], value)
                object.__setattr__(self, "_given", self.given - {name} | given)
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        problems: list[str] = []
        for group in groups(type(self)):
            hints = hints_of(group)
            for item in fields(group):
                try:
                    setattr(self, item.name, _allowed(item, hints[item.name], getattr(self, item.name)))
                except UserError as error:
                    problems.append(str(error))
        refuse_all(problems)
        for group in groups(type(self)):
            try:
                group.check(self)
            except UserError as error:
                problems.append(str(error))
        refuse_all(problems)
        object.__setattr__(self, "_given", vars(self).pop("_asked", frozenset()))

    def check(self) -> None:
        """Raise UserError for values that do not fit each other; each theme has its own."""

    @property
    def given(self) -> frozenset[str]:
        """Names of the flags that were passed, whatever their values."""
        asked: frozenset[str] = vars(self).get("_given", self._asked)
        return asked


def asked_for(kind: type[Flags], given: Mapping[str, object]) -> frozenset[str]:
    """Return the names of the flags that are passed to a class; None is none.

    One that has its default counts too: it may contradict the JSON, or be without effect. But where all flags are
    passed, as `dataclasses.replace` does, nobody has asked for those that have their defaults.
    """
    defaults = {item.name: item.default for item in fields(kind)}
    everything = defaults.keys() <= given.keys()
    return frozenset(
        name for name, value in given.items() if value is not None and not (everything and value == defaults[name])
    )


def hints_of(kind: type[Flags]) -> Mapping[str, object]:
    """Return the types of a class's fields."""
    return _hints(kind)  # type: ignore[arg-type]  # mypy takes the class for its instances, which have no hash


_hints = cache(get_type_hints)


def groups(kind: type[Flags]) -> tuple[type[Flags], ...]:
    """Return the themes of a class of flags in their order: itself, or what it is derived from."""
    bases = tuple(base for base in kind.__bases__ if base is not Flags and issubclass(base, Flags))
    return bases or (kind,)


def _allowed(item: Field[object], hint: object, value: object) -> object:
    """Return a flag's value in its type; None stands for the default. UserError for a value that is not allowed."""
    if value is None:
        return item.default
    least, choices = item.metadata["least"], item.metadata["choices"]
    try:
        value = typed(hint, value)
    except ValueError as error:
        raise UserError(f"--{item.name} {value!r}: {error}") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--{item.name} {value}: must be a finite number")
    if least is not None and isinstance(value, int | float) and value < least:
        raise UserError(f"--{item.name} {value}: must be at least {least}")
    if choices and value not in choices:
        raise UserError(f"--{item.name} {value}: not one of {', '.join(choices)}")
    return value
