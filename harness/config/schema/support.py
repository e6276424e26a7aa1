"""The DeepSpeed version that the rules describe, and whether it is installed. DeepSpeed is not imported."""

from __future__ import annotations

import re
from importlib import metadata

from harness.config.schema import supported


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def version_warning(installed: str | None = None) -> str | None:
    """Return a sentence if the rules were tested with another DeepSpeed than the installed one; else None."""
    if installed is None:
        try:
            installed = metadata.version("deepspeed")
        except metadata.PackageNotFoundError:
            return None
    low, high = supported()
    if _numbers(low) <= _numbers(installed) < _numbers(high):
        return None
    return f"the rules are tested with DeepSpeed {low} up to (not including) {high}, but {installed} is installed"
