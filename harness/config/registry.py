"""All rules, in the order of their codes: the one table that maps a code to its rule."""

from __future__ import annotations

from harness.config.rule import Rule
from harness.config.rules import (
    activation,
    auto,
    batch,
    data,
    harness,
    keys,
    layout,
    model,
    muon,
    offload,
    optimizer,
    pipeline,
    precision,
    run,
    scheduler,
    text,
    values,
    zero,
)

_FILES = (
    text,
    keys,
    harness,
    values,
    batch,
    auto,
    layout,
    precision,
    zero,
    offload,
    pipeline,
    activation,
    data,
    optimizer,
    muon,
    scheduler,
    model,
    run,
)

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (found for file in _FILES for found in vars(file).values() if isinstance(found, Rule)),
        key=lambda found: found.code,
    )
)


def by_code(code: str) -> Rule | None:
    """The rule with a code or a name, in whatever case."""
    wanted = code.lower()
    return next((found for found in RULES if wanted in (found.code.lower(), found.name)), None)
