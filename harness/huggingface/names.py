"""Refuse methods and arguments of HuggingFace's Trainer that ours does not have, and say what to use instead.

An overridden method that is never called, or a keyword that is dropped, would silently train something else.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

from harness.errors import UserError, refuse_all
from harness.spelling import nearest

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
METHODS, ATTRIBUTES, ARGUMENTS = (
    {name: row["instead"] for row in _TABLE[kind] for name in row["names"]}
    for kind in ("methods", "attributes", "arguments")
)
"""Name of a method, attribute or argument that only HuggingFace's Trainer has -> what to use instead."""

NOT_CALLED = frozenset(["get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"])
"""Methods that programs may call, but that training never calls: overriding them would have no effect."""

LOOP = "use a TrainerCallback"


class NotHere(UserError, AttributeError):
    """A member of HuggingFace's Trainer that ours does not have; an AttributeError, so that `hasattr` is false."""


def missing(trainer: object, name: str) -> AttributeError:
    """Return the error for a missing attribute of the Trainer; for one of HuggingFace's with what to use instead."""
    if not name.startswith("__") and name in METHODS.keys() | methods_of_transformers():
        return NotHere(f"Trainer.{name} is a method of HuggingFace's Trainer: {METHODS.get(name, LOOP)}")
    if name in ATTRIBUTES:
        return NotHere(f"Trainer.{name} is an attribute of HuggingFace's Trainer: {ATTRIBUTES[name]}")
    return AttributeError(f"{type(trainer).__name__!r} object has no attribute {name!r}")


def require_ours(kind: type, others: Mapping[str, object]) -> None:
    """Raise UserError if a user's class `kind` overrides methods that our Trainer, its base, never calls.

    Also raise it for keyword arguments `others`, which the constructor does not take, unless they are HuggingFace's
    with its own default, None.
    """
    base = next(cls for cls in kind.__mro__ if cls.__module__.startswith("harness."))
    for cls in (each for each in kind.__mro__ if each not in base.__mro__):
        known = methods_of_transformers() | METHODS.keys()  # the import takes seconds, so only for subclasses
        for name in vars(cls):
            if name in known and (name in NOT_CALLED or not _serves(getattr(cls, name), getattr(base, name, None))):
                remedy = METHODS.get(name, LOOP)
                raise UserError(
                    f"{cls.__name__}.{name} is a method of HuggingFace's Trainer that is not called here: {remedy}"
                )
    given = [name for name, value in others.items() if name not in ARGUMENTS or value is not None]
    refuse_arguments(given, base, ARGUMENTS, "Trainer")


def refuse_arguments(
    given: Iterable[str], function: Callable[..., object], remedies: Mapping[str, str], what: str
) -> None:
    """Raise UserError for keyword arguments `given` that `function` does not take, with a remedy for each."""
    problems = []
    for name in given:
        close = nearest(name, inspect.signature(function).parameters)
        remedy = remedies.get(name) or (f"did you mean {close}?" if close else "leave it out")
        problems.append(f"{what} takes no {name}: {remedy}")
    refuse_all(problems)


@cache
def methods_of_transformers() -> frozenset[str]:
    """Return the methods of HuggingFace's Trainer; none if it cannot be imported."""
    try:
        from transformers import Trainer
    except (ImportError, RuntimeError):  # it needs accelerate, which we do not
        return frozenset()
    return frozenset(
        name for name, member in vars(Trainer).items() if inspect.isfunction(member) and name != "__init__"
    )


def _serves(method: Callable[..., object], of_base: Callable[..., object] | None) -> bool:
    """Return whether a method can replace the one that it overrides: whether that has all arguments it requires."""
    if of_base is None:
        return False
    takes = inspect.signature(of_base).parameters
    parameters = list(inspect.signature(method).parameters.items())[1:]  # without self
    required = [
        name
        for name, each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return all(name in takes for name in required)
