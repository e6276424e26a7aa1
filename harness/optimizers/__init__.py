"""Optimizers: one module per family, with records of everything that differs between them. Imports no torch."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module

from harness.optimizers.optimizer import OptimizerClass, OptimizerType, Range

__all__ = ["DEFAULT", "FLAGS", "OPTIMIZERS", "OptimizerClass", "OptimizerType", "Range", "find"]


def _found() -> Iterator[OptimizerType]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, OptimizerType):
                yield value


OPTIMIZERS: Mapping[str, OptimizerType] = {
    each.name: each for each in sorted(_found(), key=lambda each: each.name.lower())
}
"""All optimizers by name, in alphabetical order."""
DEFAULT = OPTIMIZERS["AdamW"]
"""The optimizer of a run whose config names none."""
FLAGS: Mapping[str, OptimizerType] = {flag: each for each in OPTIMIZERS.values() for flag in each.flags}
"""Values of --optim."""
# DeepSpeed lowers the case of its own names only, and looks any other name up as it is.
_ANY_CASE = {each.name.lower(): each for each in OPTIMIZERS.values() if each.source == "deepspeed"}


def find(name: str) -> OptimizerType | None:
    """Return the optimizer named by a config; None for an unknown name."""
    return _ANY_CASE.get(name.lower()) or OPTIMIZERS.get(name)
