"""What a touch of something private of DeepSpeed is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Touch:
    """One thing of DeepSpeed that its documentation does not promise, and that the harness depends on.

    Attributes:
        name: of the module here that touches it, and what it is.
        where: `module` or `module:member` of DeepSpeed.
        why: what the harness does with it.
        parameters: names that a function must take, in order, without `self`; None for anything else.
        sets: attributes that the code of `where` must assign.
        uses: names and texts that the code of `where` must read.
        seen: version of DeepSpeed in which all this holds.
    """

    name: str
    where: str
    why: str
    parameters: tuple[str, ...] | None = None
    sets: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    seen: str = "0.19.8"
