"""Count operations as a compiler, or hand-written kernels, would fuse them.

What is fused is one kernel for each size of what it writes. It reads what comes from outside, and writes what others
read. What only its own backward pass reads is not written but computed again there, from the same inputs, as
torch.compile and the kernels of the harness and of Liger do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.planner.hardware import Hardware

from .operations import ATTENTION, ELEMENTWISE, LOSS, NORMS, PRODUCTS, ROTARY, ROUNDING, Operand, Recorded

Fusion = Literal["compile", "kernels"]


@dataclass(frozen=True)
class _Region:
    """Operations that become one: `scope` is what a forward and its backward have in common."""

    scope: Hashable
    backward: bool
    run: int = 0


def fused(recorded: Sequence[Recorded], fusion: Fusion | None, hardware: Hardware) -> list[Recorded]:
    """Return the operations of a step as they are fused, with what they cost a device.

    Args:
        fusion: "compile": all that lies between two products in the forward or the backward pass of a layer, and the
            loss; "kernels": norms, rotary embeddings, activations and the loss by themselves; None: nothing.
    """
    if fusion is None:
        return list(recorded)
    regions = _of_layers(recorded) if fusion == "compile" else _of_modules(recorded)
    members: dict[_Region, list[Recorded]] = defaultdict(list)
    for each, region in zip(recorded, regions, strict=True):
        if region is not None:
            members[region].append(each)
    found = [each for each, region in zip(recorded, regions, strict=True) if region is None]
    graph = _Graph(recorded, regions)
    return [*found, *(_costed(graph.merged(region, parts), hardware) for region, parts in members.items())]


def _costed(merged: Recorded, hardware: Hardware) -> Recorded:
    moved = float(sum(operand.size for operand in (*merged.reads, *merged.writes)))
    seconds = moved / hardware.memory_bytes_per_second + merged.kernels * hardware.kernel_seconds
    return replace(merged, bytes=moved, seconds=seconds)


def _of_modules(recorded: Sequence[Recorded]) -> list[_Region | None]:
    found = _of_losses(recorded)
    for at, each in enumerate(recorded):
        if each.part in (NORMS, ROTARY, ELEMENTWISE) and each.call and not each.collective:
            found[at] = _Region((each.part, each.call), each.backward)
    return found


def _of_losses(recorded: Iterable[Recorded]) -> list[_Region | None]:
    """Return regions of the operations that compute a loss, or its gradient, one after the other."""
    found: list[_Region | None] = []
    run = 0
    for each in recorded:
        if each.part == LOSS and not each.collective:
            found.append(_Region(LOSS, each.backward, run))
        else:
            run += 1
            found.append(None)
    return found


def _of_layers(recorded: Sequence[Recorded]) -> list[_Region | None]:
    """Return regions that end at each operation that a compiler leaves to a library, and at each collective."""
    found = _of_losses(recorded)
    run = 0
    for at, each in enumerate(recorded):
        if each.part in (PRODUCTS, ROUNDING, ATTENTION) or each.collective or not each.layer:
            run += 1
        elif found[at] is None:
            found[at] = _Region(each.layer, each.backward, run)
    return found


class _Graph:
    """Who makes and who reads each tensor of a step."""

    def __init__(self, recorded: Sequence[Recorded], regions: Sequence[_Region | None]) -> None:
        self._maker: dict[int, _Region | None] = {}
        self._readers: dict[int, set[_Region | None]] = defaultdict(set)
        self._inputs: dict[_Region, dict[int, list[Operand]]] = defaultdict(lambda: defaultdict(list))
        self._read_for: dict[int, list[Operand]] = defaultdict(list)
        for each, region in zip(recorded, regions, strict=True):
            for operand in each.reads:
                self._readers[operand.memory].add(region)
                known = self._maker.setdefault(operand.memory, None)  # made before the step
                if region is not None and known != region:
                    self._inputs[region][operand.memory].append(operand)
            for operand in each.writes:
                self._maker.setdefault(operand.memory, region)
                if self._maker[operand.memory] == region:
                    self._read_for[operand.memory] += each.reads

    def merged(self, region: _Region, members: Sequence[Recorded]) -> Recorded:
        """Return the operations of a region as one."""
        inputs: dict[int, list[Operand]] = defaultdict(list)
        for memory, operands in self._inputs[region].items():
            maker = self._maker[memory]
            if region.backward and maker is not None and self._is_recomputed(memory, maker):
                self._read_again(memory, maker, inputs, set())
            else:
                inputs[memory] += operands
        outputs: dict[int, list[Operand]] = defaultdict(list)
        for operand in (operand for each in members for operand in each.writes):
            outside = self._readers[operand.memory] - {region}
            is_made_here = self._maker[operand.memory] == region
            if (outside and not self._is_recomputed(operand.memory, region)) or not is_made_here:
                outputs[operand.memory].append(operand)
        largest = max(members, key=lambda each: each.bytes)
        reads, writes = ([_joined(operands) for operands in each.values()] for each in (inputs, outputs))
        kernels = max(1, len({operand.size for operand in writes}))
        return replace(largest, name="fused", reads=tuple(reads), writes=tuple(writes), kernels=kernels)

    def _read_again(self, memory: int, maker: _Region, inputs: dict[int, list[Operand]], seen: set[int]) -> None:
        """Add to `inputs` what is read where a tensor is computed again: what its forward read, or wrote for others."""
        seen.add(memory)
        for operand in self._read_for[memory]:
            if self._maker[operand.memory] != maker or not self._is_recomputed(operand.memory, maker):
                inputs[operand.memory].append(operand)
            elif operand.memory not in seen:
                self._read_again(operand.memory, maker, inputs, seen)

    def _is_recomputed(self, memory: int, maker: _Region) -> bool:
        """Return whether only the forward that makes a tensor and its own backward read it."""
        return not maker.backward and all(
            reader is not None and reader.scope == maker.scope and (reader == maker or reader.backward)
            for reader in self._readers[memory]
        )


def _joined(operands: Sequence[Operand]) -> Operand:
    """Return one operand for all parts of a storage: each place counts once."""
    places = {operand.place: operand for operand in operands}
    return replace(operands[0], size=min(sum(each.size for each in places.values()), operands[0].limit))
