"""All rules, in the order of their codes: the one table that maps a code to its rule."""

from __future__ import annotations

from harness.config.rules.deepspeed import (
    activation,
    auto,
    batch,
    data,
    muon,
    offload,
    optimizer,
    precision,
    run,
    scheduler,
    zero,
)
from harness.config.rules.layout import harness_limits, layout, model, pipeline
from harness.config.rules.rule import Rule
from harness.config.rules.syntax import keys, text, values

_FILES = (
    keys,
    text,
    values,
    activation,
    auto,
    batch,
    data,
    muon,
    offload,
    optimizer,
    precision,
    run,
    scheduler,
    zero,
    harness_limits,
    layout,
    model,
    pipeline,
)

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (found for file in _FILES for found in vars(file).values() if isinstance(found, Rule)),
        key=lambda found: found.code,
    )
)


def by_code(code: str) -> Rule | None:
    """Return the rule with a code or a name, in whatever case."""
    wanted = code.lower()
    return next((found for found in RULES if wanted in (found.code.lower(), found.name)), None)
