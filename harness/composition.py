"""Put the core and its parts together: the only module that imports both.

A part whose folder is not installed is absent. `from harness import Trainer` is the Trainer of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import ClassVar

from harness.training.parts import Parts
from harness.training.trainer import Trainer as CoreTrainer


def installed_parts() -> Parts:
    """Return all parts that are installed."""
    parts = Parts()
    adding: dict[str, Callable[[Parts], Parts]] = {
        "harness.planner": _with_planner,
        "harness.report": _with_report,
    }
    for folder, add in adding.items():
        if _is_installed(folder):
            parts = add(parts)
    return parts


def _is_installed(folder: str) -> bool:
    spec = find_spec(folder)
    return spec is not None and spec.origin is not None  # a deleted package may leave a folder of caches: no origin


def _with_planner(parts: Parts) -> Parts:
    from harness.planner.forecast import forecast

    return replace(parts, forecast=forecast)


def _with_report(parts: Parts) -> Parts:
    from harness.report import certificate
    from harness.report.profile.profiler import ProfileCallback

    return replace(parts, profiling=ProfileCallback, certificate=certificate.of_run)


class Trainer(CoreTrainer):
    __doc__ = CoreTrainer.__doc__

    parts: ClassVar[Parts] = installed_parts()
