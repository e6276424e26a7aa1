"""Numbers of steps between events, which HuggingFace also takes as fractions of all steps."""

import math

from harness.errors import UserError


def checked_interval(name: str, value: float, *, least: float | None = None) -> float:
    """Return a number of steps, or a fraction of all steps below 1. Raises UserError for any other value.

    Args:
        least: the smallest value, such as 0 for "never"; None if the value must be above 0.
    """
    if value > 1 and value != int(value):
        raise UserError(f"--{name} {value}: must be a whole number of steps, or below 1, the fraction of all steps")
    if value < 0 or (value == 0 and least is None):
        raise UserError(f"--{name} {value}: must be {'above 0' if least is None else f'at least {least}'}")
    return value if 0 < value < 1 else int(value)


def interval(value: float, max_steps: int) -> int:
    """Return the number of steps between events in a run of `max_steps`, rounded up as in HuggingFace; 0: never."""
    return math.ceil(value * max_steps) if value < 1 else int(value)
