"""Define flags: fields of dataclasses with their help and allowed values."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import MISSING, Field, InitVar, dataclass, field, fields
from functools import cache
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_type_hints

from harness.config.values.paths import usable_path
from harness.config.values.typed import takes, typed
from harness.errors import UserError, refuse_all

T = TypeVar("T")

ALIASES = {
    "deepspeed": "deepspeed_config",
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
    "no_cuda": "use_cpu",
}
"""Alternative name of a flag in HuggingFace -> its name here."""


class Help(str):
    """The help text of a flag, with its allowed values as attributes.

    Besides `aliases` it is the only entry of a field's metadata: transformers' HfArgumentParser passes all others on to
    argparse, which refuses unknown ones.
    """

    least: float | None
    choices: tuple[str, ...]
    paths: bool
    hf_only: bool

    @classmethod
    def of(cls, item: Field[Any]) -> "Help":
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
    aliases: Sequence[str] = (),
    of_scripts: bool = False,
) -> T:
    """Return the dataclass field of a flag.

    Args:
        text: the help text.
        least: the smallest allowed value.
        choices: the only allowed values; for a boolean, the words besides true and false.
        paths: whether the value is a path, or a name that may also be a path; commas do not separate several.
        hf_only: whether the flag applies only to HuggingFace models, and is refused for a list of layers.
        aliases: its names in ALIASES, which HfArgumentParser adds.
        of_scripts: whether scripts for HuggingFace's Trainer, such as run_clm.py, declare a flag of this name. Then
            HfArgumentParser must not add it again: it skips fields with `init=False`. Our constructor takes it.
    """
    # argparse formats a help text with `%`.
    about = Help(text.replace("%", "%%"))
    about.least = least
    about.choices = tuple(choices)
    about.paths = paths
    about.hf_only = hf_only
    metadata = {"help": about, "aliases": [f"--{name}" for name in aliases]}
    if isinstance(default, list):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, init=not of_scripts, metadata=metadata)


def require_one_name(names: dict[str, str], own: str, name: str, where: str = "") -> None:
    """Record in `names` the name under which a flag was given. Raises UserError for a second name of one flag."""
    if (other := names.setdefault(own, name)) != name:
        raise UserError(f"{where}{other} and {name} are the same flag: give one of them")


def default_of(item: Field[object]) -> object:
    """Return the default of a dataclass field, copied if it is a list; MISSING without a default."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def _is_taken(item: Field[object]) -> bool:
    """Return whether the constructor takes a field: every flag, and a program's own fields unless `init=False`."""
    return item.init or isinstance(item.metadata.get("help"), Help)


class _Fields:
    """The signature of a class of flags, for `inspect` and `help`: its fields with types and defaults."""

    def __get__(self, _made: object, kind: type["Flags"]) -> Signature:
        shown = []
        for item in (item for item in fields(kind) if _is_taken(item)):
            default = default_of(item)
            # A class that only changes a flag's default keeps the rest of the theme's field.
            of_theme, _ = flags_of(kind).get(item.name, (item, None))
            by_name = Parameter.KEYWORD_ONLY if of_theme.kw_only else Parameter.POSITIONAL_OR_KEYWORD
            default = Parameter.empty if default is MISSING else default
            shown.append(Parameter(item.name, by_name, default=default, annotation=item.type))
        # A keyword-only field may come before a positional one in a derived class, but not in a signature.
        return Signature(sorted(shown, key=lambda each: each.kind))


@dataclass(kw_only=True)
class Flags:
    """The flags of a theme, or of several themes: a class derived from several `Flags` has all of their flags.

    All share one constructor, which records which flags are passed. A flag passed with its default value counts as
    given, as it may contradict the JSON. If a caller passes all fields, like transformers' HfArgumentParser, only
    values other than the defaults count.

    Attributes:
        TITLE: the theme's heading in `--help` and in the docs.
    """

    TITLE: ClassVar[str] = ""
    __signature__ = _Fields()
    # Not for users: `dataclasses.replace` reads these and passes them to the copy.
    if not TYPE_CHECKING:
        _given: InitVar[frozenset[str] | None] = None
        _without_effect: InitVar[Mapping[str, object] | None] = None
        _of_scripts: InitVar[Mapping[str, object] | None] = None

    def __init_subclass__(cls) -> None:
        """Keep the constructor: `@dataclass` only generates one for a class without its own."""
        super().__init_subclass__()
        if "__init__" not in vars(cls):
            setattr(cls, "__init__", Flags.__init__)  # noqa: B010  # mypy refuses an assignment to __init__

    def __init__(
        self,
        *args: object,
        _given: frozenset[str] | None = None,
        _without_effect: Mapping[str, object] | None = None,
        _of_scripts: Mapping[str, object] | None = None,
        **flags: object,
    ) -> None:
        flags = {**(_of_scripts or {}), **flags}
        values = self.__signature__.bind(*args, **self.own_names(flags)).arguments
        defaults = {item.name: default_of(item) for item in fields(self)}
        # HfArgumentParser passes every field, so a default among them was not asked for.
        everything = {item.name for item in fields(self) if item.init} <= {*values, *flags}
        noted = (_given or frozenset()) if everything else values.keys()
        given = {
            name for name, value in values.items() if value is not None and (name in noted or value != defaults[name])
        }
        idle = {name: value for name, value in flags.items() if ALIASES.get(name, name) not in defaults}
        # Past `__setattr__`, which would count every flag as given.
        vars(self).update(
            {name: value for name, value in {**defaults, **values}.items() if value is not MISSING},
            _given=frozenset(given),
            _without_effect={**(_without_effect or {}), **idle},
        )
        self.__post_init__()

    def __post_init__(self) -> None:
        """Convert every value to its type and check it; None means the default. Raises all problems together."""
        given = self.given
        problems: list[str] = []
        for name in flags_of(type(self)):
            try:
                # Past `__setattr__` too.
                vars(self)[name] = self._taken(name, getattr(self, name))
            except UserError as error:
                problems.append(str(error))
        for group in groups(type(self)):
            try:
                group.check(self)
            except UserError as error:
                # Unless the flag is refused already.
                flag = str(error).partition(" ")[0]
                if not any(problem.startswith(f"{flag} ") for problem in problems):
                    problems.append(str(error))
            except (TypeError, ValueError, AttributeError, OverflowError):
                # Otherwise a wrong or infinite value, reported already, has confused this check.
                if not problems:
                    raise
        refuse_all(problems)
        # Flags that a check has set do not count.
        vars(self)["_given"] = given
        self._note_of_scripts()

    def __setattr__(self, name: str, value: object) -> None:
        """Set a flag, which then counts as given; the value is checked as in the constructor."""
        if any(item.name == name for item in fields(self)):
            given = frozenset() if value is None else {name}
            value = self._taken(name, value)
            vars(self)["_given"] = self.given - {name} | given
        super().__setattr__(name, value)
        self._note_of_scripts()

    def _note_of_scripts(self) -> None:
        """Keep the flags that `dataclasses.replace` does not pass to a copy where it finds them."""
        hidden = [item.name for item in fields(self) if not item.init and _is_taken(item)]
        vars(self)["_of_scripts"] = {name: getattr(self, name) for name in hidden}

    def _taken(self, name: str, value: object) -> object:
        """Return a field's value: converted and checked for a flag (see `_allowed`), with the default for None."""
        # A field of a program's own class.
        if name not in flags_of(type(self)):
            return value
        if value is None:
            return next(default_of(item) for item in fields(self) if item.name == name)
        return _allowed(*flags_of(type(self))[name], value)

    def check(self) -> None:
        """Raise UserError for values that contradict each other; overridden by each theme."""

    @property
    def given(self) -> frozenset[str]:
        """Names of the flags that were passed with any value except None."""
        found: frozenset[str] = vars(self)["_given"]
        return found

    @property
    def without_effect(self) -> Mapping[str, object]:
        """The passed HuggingFace arguments that request behaviour the harness always has."""
        found: Mapping[str, object] = vars(self).get("_without_effect", {})
        return found

    @classmethod
    def own_names(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Return the constructor's keyword arguments under the names of the flags."""
        return given


def groups(kind: type[Flags]) -> tuple[type[Flags], ...]:
    """Return the themes of a class of flags in order: the class itself, or all that it is derived from."""
    return tuple(each for each in kind.__mro__ if Flags in each.__bases__)


def flags_of(kind: type[Flags]) -> Mapping[str, tuple[Field[object], object]]:
    """Return the flags of all themes of a class, each with its type."""
    return _flags_of(kind)  # type: ignore[arg-type]  # mypy takes the class for its instances, which have no hash


# Every assignment to a flag asks for its field, and resolving type hints is slow.
@cache
def _flags_of(kind: type[Flags]) -> Mapping[str, tuple[Field[object], object]]:
    hints = {group: get_type_hints(group) for group in groups(kind)}
    return {item.name: (item, hints[group][item.name]) for group in hints for item in fields(group)}


def _allowed(item: Field[object], hint: object, value: object) -> object:
    """Return a flag's value converted to its type. Raises UserError for a value that is not allowed."""
    about = Help.of(item)
    try:
        value = typed(hint, value)
    except ValueError as error:
        raise UserError(f"--{item.name} {value!r}: {error}") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--{item.name} {value}: must be a finite number")
    if about.least is not None and isinstance(value, int | float) and value < about.least:
        raise UserError(f"--{item.name} {value}: must be at least {about.least}")
    if about.choices and value not in about.choices and not isinstance(value, bool):
        words = ("true", "false", *about.choices) if takes(hint, bool) else about.choices
        raise UserError(f"--{item.name} {value}: not one of {', '.join(words)}")
    if about.paths:
        _require_usable(item.name, value)
    return value


def _require_usable(name: str, value: object) -> None:
    """Raise UserError for a path that no file can have. Mappings and JSON texts are content, not paths."""
    for path in value if isinstance(value, list) else [value]:
        if isinstance(path, str) and not path.lstrip().startswith("{"):
            try:
                usable_path(path)
            except ValueError as error:
                raise UserError(f"--{name} {path[:80]}: no file can have this name: {error}") from error
