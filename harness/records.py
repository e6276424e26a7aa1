"""Records with a module each, such as pipeline schedules or data formats: to add one is to add a file."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


def records(package: str, path: Iterable[str], kind: type[T], name: Callable[[T], str]) -> dict[str, T]:
    """Return the records of a class in a package's modules by name. Raises ValueError for two of one name."""
    found: dict[str, T] = {}
    for module in pkgutil.iter_modules(path, f"{package}."):
        for value in vars(import_module(module.name)).values():
            # The later record would silently replace the earlier one. A module may import a record of another.
            if isinstance(value, kind) and found.setdefault(name(value), value) is not value:
                raise ValueError(f"two {kind.__name__}s are named {name(value)!r}, one in {module.name}: rename one")
    return found
