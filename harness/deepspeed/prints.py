"""What DeepSpeed's pipeline prints of itself, in the midst of a program's own output."""

from __future__ import annotations

from deepspeed.runtime.pipe import module, topology


def silence_prints() -> None:
    """Have DeepSpeed's pipeline print nothing; what it logs and warns of stays."""
    for place in (module, topology):
        vars(place)["print"] = _print_nothing


def _print_nothing(*_words: object) -> None:
    """Take the place of `print`."""
