"""Move tensors between ranks when layers move to other stages: each rank sends its parts to ranks that need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.checkpoint.tensors.local_shard import LocalShard
from harness.hf.weights.lazy_tensor import Box
from harness.topology.agreement import all_gather_object


@dataclass(frozen=True)
class Transfer:
    """A box (a range in each dimension) of a tensor that rank `source` sends to rank `target`."""

    name: str
    box: Box
    source: int
    target: int


@torch.no_grad()
def exchange(have: Sequence[LocalShard], want: Sequence[LocalShard], stage: int, device: torch.device) -> None:
    """Fill `want` with the values of the same tensors on all ranks; all ranks call it.

    Ranks send only values that they own. One tensor is sent at a time, so no rank needs buffers for more.

    Args:
        stage: this rank's stage; a tied tensor exists on several stages.
        device: the device on which the backend communicates.

    Raises:
        ValueError: no rank has some of the values.
    """
    own = [(held.name, box) for held in have if held.owned for box, _ in held.pieces()]
    needed = [(held.name, box) for held in want for box, _ in held.pieces()]
    owned, wanted, stages = zip(*all_gather_object((own, needed, stage)), strict=True)
    plan = transfers(owned, wanted, stages)
    sources = _by_name(held for held in have if held.owned)
    targets = _by_name(want)
    for name in sorted({each.name for each in plan}):
        _move([each for each in plan if each.name == name], sources.get(name, []), targets.get(name, []), device)


def transfers(
    have: Sequence[Sequence[tuple[str, Box]]], want: Sequence[Sequence[tuple[str, Box]]], stages: Sequence[int]
) -> list[Transfer]:
    """Return all transfers, given the boxes that each rank owns and needs, and each rank's stage.

    Within a stage each element has one owner. Values that several stages hold are taken from the target's own stage
    if possible, else from the first.

    Raises ValueError if needed values have no owner.
    """
    owners: dict[str, dict[int, list[tuple[int, Box]]]] = {}
    for rank, pieces in enumerate(have):
        for name, box in pieces:
            owners.setdefault(name, {}).setdefault(stages[rank], []).append((rank, box))
    found = []
    for target, pieces in enumerate(want):
        for name, needed in pieces:
            # A tied tensor has owners on several stages, all with the same values: prefer the target's own stage.
            by_stage = owners.get(name, {})
            nearest = stages[target] if stages[target] in by_stage else min(by_stage, default=0)
            shared = [(rank, _common(box, needed)) for rank, box in by_stage.get(nearest, [])]
            parts = [Transfer(name, box, rank, target) for rank, box in shared if box is not None]
            if sum(_size(part.box) for part in parts) != _size(needed):
                raise ValueError(f"no rank has all of {name}{list(needed)}")
            found += parts
    return found


def _move(
    plan: Sequence[Transfer],
    have: Sequence[tuple[Box, Tensor]],
    want: Sequence[tuple[Box, Tensor]],
    device: torch.device,
) -> None:
    """Move the boxes of one tensor."""
    rank = dist.get_rank()
    operations = []
    received = []
    for each in plan:
        if each.source == rank:
            values = _view(have, each.box)
            if each.target == rank:
                _view(want, each.box).copy_(values)
            else:
                sent = values.to(device).contiguous()
                operations.append(dist.P2POp(dist.isend, sent, each.target))
        elif each.target == rank:
            place = _view(want, each.box)
            arriving = torch.empty(place.shape, dtype=place.dtype, device=device)
            received.append((place, arriving))
            operations.append(dist.P2POp(dist.irecv, arriving, each.source))
    # One batch: NCCL groups the operations, so ranks that order them differently cannot deadlock.
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for place, arriving in received:
        place.copy_(arriving)


def _by_name(tensors: Sequence[LocalShard] | Iterator[LocalShard]) -> dict[str, list[tuple[Box, Tensor]]]:
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for held in tensors:
        found.setdefault(held.name, []).extend(held.pieces())
    return found


def _view(pieces: Sequence[tuple[Box, Tensor]], box: Box) -> Tensor:
    """Return the part `box` of the piece that contains it."""
    for outer, values in pieces:
        if _common(outer, box) == box:
            return values[tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(box, outer, strict=True))]
    raise ValueError(f"no piece contains {box}")


def _common(first: Box, second: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _size(box: Box) -> int:
    size = 1
    for start, stop in box:
        size *= stop - start
    return size
