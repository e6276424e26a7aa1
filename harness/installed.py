"""Which parts are installed, and those that are used before torch is imported."""

from __future__ import annotations

from importlib.util import find_spec

from harness.resilience.process.watching import Watch


def is_installed(folder: str) -> bool:
    """Return whether the package of a part is installed."""
    spec = find_spec(folder)
    return spec is not None and spec.origin is not None  # a deleted package may leave a folder of caches: no origin


def watch() -> Watch:
    """Return the watch of a run; one that watches nothing if the part is not installed."""
    if not is_installed("harness.resilience.watch"):
        return Watch()
    from harness.resilience.watch.part import RankWatch

    return RankWatch()
