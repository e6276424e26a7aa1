"""Define a flag: a field of a dataclass, with its help and its allowed values."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, InitVar, dataclass, field, fields
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
"""Other names of flags in HuggingFace -> the name here."""


class Help(str):
    """The help text of a flag, with its allowed values as attributes.

    It is the only entry of a field's metadata: transformers' HfArgumentParser passes all entries on to argparse, which
    refuses unknown ones.
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
        """The text without argparse's escapes."""
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
    """Return the dataclass field of a flag.

    Args:
        text: the help text.
        least: the smallest allowed value.
        choices: the only allowed values.
        paths: the values are paths, so a comma does not separate them.
        hf_only: the flag acts on HuggingFace models only, and is refused for a model given as a list of layers.
    """
    about = Help(text.replace("%", "%%"))
    about.least = least
    about.choices = tuple(choices)
    about.paths = paths
    about.hf_only = hf_only
    return field(default=default, metadata={"help": about})


def require_one_name(names: dict[str, str], own: str, name: str, where: str = "") -> None:
    """Record in `names` under which name a flag was given. UserError if it was given under another name before."""
    if (other := names.setdefault(own, name)) != name:
        raise UserError(f"{where}{other} and {name} are the same flag: give one of them")


def shown_default(item: Field[object]) -> str:
    """Return a flag's default as text for the user; "" without one."""
    default = None if item.default is MISSING else item.default
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return "" if default is None else str(default)


@dataclass(kw_only=True)
class Flags:
    """The flags of a theme, or of several: a class derived from several `Flags` has the flags of all.

    Attributes:
        TITLE: the theme's heading in `--help` and in the docs.
        _given: what `given` returns; `dataclasses.replace` reads it and passes it to the copy.
    """

    TITLE: ClassVar[str] = ""
    _given: InitVar[frozenset[str] | None] = None

    def __post_init__(self, given: frozenset[str] | None) -> None:
        """Convert every value to its type and check it; None means the default. Raises all problems at once."""
        if given is None:  # a derived class without `noting_given`
            given = frozenset(item.name for item in fields(self) if getattr(self, item.name) != item.default)
        vars(self)["_given"] = given
        problems: list[str] = []
        for group in groups(type(self)):
            hints = hints_of(group)
            for item in fields(group):
                try:
                    vars(self)[item.name] = _allowed(item, hints[item.name], getattr(self, item.name))
                except UserError as error:
                    problems.append(str(error))
        for group in groups(type(self)):
            try:
                group.check(self)
            except UserError as error:
                problems.append(str(error))
            except (TypeError, ValueError, AttributeError):
                if not problems:  # otherwise a value of a wrong type, already among the problems, confused this check
                    raise
        refuse_all(problems)
        vars(self)["_given"] = given  # flags that a check has set do not count

    def __setattr__(self, name: str, value: object) -> None:
        """Set a flag. After construction the value is checked like the others, and the flag counts as given."""
        item = next((item for item in fields(self) if item.name == name), None) if "_given" in vars(self) else None
        if item is not None:
            given = frozenset() if value is None else {name}
            value = _allowed(item, hints_of(type(self))[name], value)
            vars(self)["_given"] = self.given - {name} | given
        super().__setattr__(name, value)

    def check(self) -> None:
        """Raise UserError for values that contradict each other; overridden by each theme."""

    @property
    def given(self) -> frozenset[str]:
        """Names of the flags that were passed, whatever their values; a value of None counts as not passed."""
        found: frozenset[str] = vars(self)["_given"]
        return found

    @property
    def without_effect(self) -> Mapping[str, object]:
        """The HuggingFace arguments that were passed and ask for the behaviour that the harness always has."""
        found: Mapping[str, object] = vars(self).get("_without_effect", {})
        return found

    @classmethod
    def own_names(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Return the constructor's keyword arguments under the names of the flags."""
        return given


def noting_given(kind: type[F]) -> type[F]:
    """Decorate a dataclass of flags: its constructor records in `given` which flags the caller passes.

    A flag passed with its default value counts as given: it may contradict the JSON. If a caller passes all flags, as
    transformers' HfArgumentParser does, those with default values do not count; `dataclasses.replace` passes `_given`,
    to which the flags with other values are added. The signature is kept.
    """
    construct: Callable[..., None] = kind.__init__

    @wraps(construct)
    def __init__(self: F, *args: object, _given: frozenset[str] | None = None, **flags: object) -> None:
        positional = [item.name for item in fields(kind) if not item.kw_only][: len(args)]
        own = kind.own_names(flags)
        passed = {**dict(zip(positional, args, strict=False)), **own}
        defaults = {item.name: item.default for item in fields(kind)}
        everything = defaults.keys() <= {*passed, *flags}
        vars(self)["_without_effect"] = {
            name: value for name, value in flags.items() if ALIASES.get(name, name) not in defaults
        }
        noted = {
            name
            for name, value in passed.items()
            if value is not None and not (everything and value == defaults.get(name))
        }
        construct(self, *args, _given=noted | (_given or frozenset()), **own)

    setattr(kind, "__init__", __init__)  # noqa: B010  # mypy refuses an assignment to __init__
    return kind


def hints_of(kind: type[Flags]) -> Mapping[str, object]:
    """Return the types of a class's fields by name."""
    return _hints(kind)  # type: ignore[arg-type]  # mypy takes the class for its instances, which have no hash


_hints = cache(get_type_hints)


def groups(kind: type[Flags]) -> tuple[type[Flags], ...]:
    """Return the themes of a class of flags in order: the class itself, or all that it is derived from."""
    return tuple(each for each in kind.__mro__ if Flags in each.__bases__)


def _allowed(item: Field[object], hint: object, value: object) -> object:
    """Return a flag's value converted to its type; None means the default. UserError for a value not allowed."""
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
