"""Losses over preferences: one module each, with everything specific in its `PreferenceLossType`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from harness.preference_losses.preference_loss import PreferenceLossType, Scores, Settings
from harness.records import records

__all__ = ["PREFERENCE_LOSSES", "PreferenceLossType", "Scores", "Settings"]

PREFERENCE_LOSSES: Mapping[str, PreferenceLossType] = records(
    __name__, __path__, PreferenceLossType, attrgetter("name")
)
"""All losses by the value of --preference."""
