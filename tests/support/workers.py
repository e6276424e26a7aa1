"""What the functions that ranks run are made of; `ranks` runs them, and `training` has the trainings that most compare.

A worker returns what it saw, and its test asserts: so a refusal that all ranks should give is returned as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from harness.errors import UserError

Case = TypeVar("Case")
Found = TypeVar("Found")


def for_each(worker: Callable[[Case, str], Found], cases: Iterable[Case], folder: str | Path) -> list[Found]:
    """Call `worker(case, a folder of its own)` for one case after the other, in the same processes."""
    return [worker(case, f"{folder}/{number}") for number, case in enumerate(cases)]


def refusal_of(action: Callable[[], object]) -> str:
    """Return the text of the UserError that `action` raises; "" if it raises none."""
    try:
        action()
    except UserError as error:
        return str(error)
    return ""
