"""Losses over preferences: a module each, whose `LOSS` says all that differs between them. Imports no torch."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module

from harness.preference_losses.preference_loss import PreferenceLossType, Scores, Settings

__all__ = ["PREFERENCE_LOSSES", "PreferenceLossType", "Scores", "Settings"]


def _found() -> Iterator[PreferenceLossType]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        found = getattr(import_module(module.name), "LOSS", None)
        if isinstance(found, PreferenceLossType):
            yield found


PREFERENCE_LOSSES: Mapping[str, PreferenceLossType] = {each.name: each for each in _found()}
"""All losses by the value of --preference."""
