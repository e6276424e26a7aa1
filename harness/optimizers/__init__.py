"""Optimizers: one module per family, with records of everything that differs between them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from harness.optimizers.optimizer import OptimizerClass, OptimizerType, Range
from harness.records import records

__all__ = ["DEFAULT", "FLAGS", "OPTIMIZERS", "OptimizerClass", "OptimizerType", "Range", "find"]

_FOUND = records(__name__, __path__, OptimizerType, attrgetter("name"))
OPTIMIZERS: Mapping[str, OptimizerType] = {name: _FOUND[name] for name in sorted(_FOUND, key=str.lower)}
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
