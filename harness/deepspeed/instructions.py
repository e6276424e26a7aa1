"""Observers of pipeline instructions, used by the watchdog, the profiler, the dry run and the benchmarks.

An engine executes a list of instructions (`ForwardPass`, `SendActivation`, `ReduceGrads`, ...). An observer is called
before and after each with its name and arguments: `buffer_id`, `micro_batch` and `chunk`, or nothing for instructions
of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Operands: TypeAlias = Mapping[str, int]
"""The arguments of an instruction, by name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observer:
    """Functions to call before and after each instruction, with its name and arguments."""

    begin: Callable[[str, Operands], object]
    end: Callable[[str, Operands], object] = lambda _name, _place: None


def announcer(announce: Callable[[str], object], finished: Callable[[], object] = lambda: None) -> Observer:
    """Return an observer that calls `announce` with text such as `RecvGrad(0)`, and `finished` afterwards."""

    def begin(name: str, place: Operands) -> None:
        announce(f"{name}({place['buffer_id']})" if "buffer_id" in place else name)

    return Observer(begin=begin, end=lambda _name, _place: finished())
