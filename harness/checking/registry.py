"""All rules in the order of their codes; the only table that maps codes to rules."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module

from harness.checking.rules import deepspeed, layout, syntax
from harness.checking.rules.rule import Rule


def _all_rules() -> Iterator[Rule]:
    for folder in (syntax, deepspeed, layout):
        for file in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            yield from (found for found in vars(import_module(file.name)).values() if isinstance(found, Rule))


RULES: tuple[Rule, ...] = tuple(sorted(_all_rules(), key=lambda found: found.code))


def by_code(code: str) -> Rule | None:
    """Return the rule with a code or a name, ignoring case; None if there is none."""
    wanted = code.lower()
    return next((found for found in RULES if wanted in (found.code.lower(), found.name)), None)
