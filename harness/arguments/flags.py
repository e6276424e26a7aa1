"""What a flag is: a field of a dataclass, with its help and the values that it takes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, wraps
from typing import Any, ClassVar, TypeVar, get_type_hints

from harness.config.values.typed import typed
from harness.errors import UserError, refuse_all

T = TypeVar("T")
F = TypeVar("F", bound="Flags")

ALIASES = {
    "deepspeed": "deepspeed_config",
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
}
"""Other names that flags have, as in HuggingFace."""


class Help(str):
    """What `--help` says of a flag, with the values that the flag takes.

    It is all of a field's metadata, as transformers' HfArgumentParser hands metadata on to argparse.
    """

    least: float | None
    choices: tuple[str, ...]
    paths: bool
    hf_only: bool

    @classmethod
    def of(cls, item: Field[Any]) -> "Help":
        """Return the help of a flag."""
        found: Help = item.metadata["help"]
        return found

    @property
    def plain(self) -> str:
        """The text without the escapes of argparse."""
        return self.replace("%%", "%")


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
    about = Help(text.replace("%", "%%"))
    about.least, about.choices, about.paths, about.hf_only = least, tuple(choices), paths, hf_only
    return field(default=default, metadata={"help": about})


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
    """

    TITLE: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check every value, and bring it to its type; None stands for the default."""
        problems: list[str] = []
        for group in groups(type(self)):
            hints = hints_of(group)
            for item in fields(group):
                try:
                    setattr(self, item.name, _allowed(item, hints[item.name], getattr(self, item.name)))
                except UserError as error:
                    problems.append(str(error))
        for group in groups(type(self)):
            try:
                group.check(self)
            except UserError as error:
                problems.append(str(error))
            except (TypeError, ValueError, AttributeError):  # of a value of another type, which is told
                if not problems:
                    raise
        refuse_all(problems)
        given = self.given
        vars(self).pop("_asked", None)
        vars(self)["_given"] = given  # from here on the flags that are set count as given

    def __setattr__(self, name: str, value: object) -> None:
        """Set a flag; one that is set later is checked as the others are, and counts as given."""
        item = next((item for item in fields(self) if item.name == name), None) if "_given" in vars(self) else None
        if item is not None:
            given = frozenset() if value is None else {name}
            value = _allowed(item, hints_of(type(self))[name], value)
            vars(self)["_given"] = self.given - {name} | given
        super().__setattr__(name, value)

    def check(self) -> None:
        """Raise UserError for values that do not fit each other; each theme has its own."""

    @property
    def without_effect(self) -> Mapping[str, object]:
        """What was passed of HuggingFace's that asks for what is done in any case."""
        found: Mapping[str, object] = vars(self).get("_stands", {})
        return found

    @classmethod
    def own_names(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Return the keyword arguments of the constructor by the names of the flags."""
        return given

    @property
    def given(self) -> frozenset[str]:
        """Names of the flags that were passed, whatever their values; None is none."""
        noted: frozenset[str] | None = vars(self).get("_given", vars(self).get("_asked"))
        if noted is not None:
            return noted
        return frozenset(item.name for item in fields(self) if getattr(self, item.name) != item.default)


def noting_given(kind: type[F]) -> type[F]:
    """Let the constructor of a dataclass of flags note which of them its caller passes; its signature stays.

    A flag that is passed with its default counts too: it may contradict the JSON, or be without effect. But where a
    program passes all flags, as `dataclasses.replace` and transformers' HfArgumentParser do, nobody has asked for
    those that have their defaults. A class that is derived without this decorator has given what is not its default.
    """
    construct: Callable[..., None] = kind.__init__

    @wraps(construct)
    def __init__(self: F, *args: object, **given: object) -> None:
        positional = [item.name for item in fields(kind) if not item.kw_only][: len(args)]
        own = kind.own_names(given)
        passed = {**dict(zip(positional, args, strict=False)), **own}
        defaults = {item.name: item.default for item in fields(kind)}
        everything = defaults.keys() <= {*passed, *given}
        vars(self)["_stands"] = {
            name: value for name, value in given.items() if ALIASES.get(name, name) not in defaults
        }
        vars(self)["_asked"] = frozenset(
            name
            for name, value in passed.items()
            if value is not None and not (everything and value == defaults.get(name))
        )
        construct(self, *args, **own)

    setattr(kind, "__init__", __init__)  # noqa: B010  # mypy has no way to say it
    return kind


def hints_of(kind: type[Flags]) -> Mapping[str, object]:
    """Return the types of a class's fields."""
    return _hints(kind)  # type: ignore[arg-type]  # mypy takes the class for its instances, which have no hash


_hints = cache(get_type_hints)


def groups(kind: type[Flags]) -> tuple[type[Flags], ...]:
    """Return the themes of a class of flags in their order: itself, or all that it is derived from."""
    return tuple(each for each in kind.__mro__ if Flags in each.__bases__)


def _allowed(item: Field[object], hint: object, value: object) -> object:
    """Return a flag's value in its type; None stands for the default. UserError for a value that is not allowed."""
    if value is None:
        return item.default
    least, choices = Help.of(item).least, Help.of(item).choices
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
