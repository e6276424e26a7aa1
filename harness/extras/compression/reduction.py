"""Average gradients over data-parallel ranks, sent in 8 or 4 bits, with error feedback.

The reduction is that of ZeRO++'s qgZ (Wang et al. 2023, arXiv 2306.10209): every rank quantises its gradients and sends
each other rank a share (all-to-all); the owner of a share sums it in float32, quantises the mean and sends it to all
(all-gather). All ranks read the same bytes, so they hold the same result to the bit. The rounding error of both
quantisations is kept on the rank that rounded, and added before the next one (Seide et al. 2014).

The result for a block depends on that block alone. A weight that other stages or tensor-parallel ranks hold too must
get the same result there, so it must lie in equal blocks on all of them. It begins a block of its own, or lies among
weights that they all have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from harness.extras.compression.quantization import BLOCK, dequantize, quantize
from harness.parallel.collectives import gather_single

BUCKET = 1 << 22
"""Number of elements that are reduced together: 16 MiB in float32. The reduction needs a few times that as memory."""
PACKED, ALIGNED, EXACT = "packed", "aligned", "exact"


@dataclass(frozen=True)
class Piece:
    """A gradient of a bucket, or a part of one.

    Attributes:
        index: index of the gradient.
        start: index of the piece's first element in the flattened gradient.
        length: number of its elements.
        offset: index of its first element in the bucket.
    """

    index: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together, and the size of their buffer in elements, with padding."""

    pieces: tuple[Piece, ...]
    size: int


def arrange(sizes: Sequence[int], order: Sequence[int], ranks: int, *, aligned: bool) -> Iterator[Bucket]:
    """Yield buckets of the gradients with indices `order`; a gradient larger than a bucket is cut between two blocks.

    Args:
        sizes: number of elements of each gradient.
        aligned: whether each gradient begins a block of its own.
    """
    pieces: list[Piece] = []
    end = 0
    for index in order:
        for start in range(0, sizes[index], BUCKET):
            length = min(BUCKET, sizes[index] - start)
            if pieces and end + length > BUCKET:
                yield Bucket(pieces=tuple(pieces), size=_up(end, BLOCK * ranks))
                pieces, end = [], 0
            pieces.append(Piece(index, start, length, end))
            end += _up(length, BLOCK) if aligned else length
    if pieces:
        yield Bucket(pieces=tuple(pieces), size=_up(end, BLOCK * ranks))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(kw_only=True)
class Residue:
    """The rounding errors of one bucket: of the gradients that this rank sent, and of the means that it computed."""

    sent: Tensor
    owned: Tensor

    @classmethod
    def none(cls, size: int, ranks: int, device: torch.device) -> Residue:
        """Return the residue before the first step: zeros."""
        # an error is at most half a step of the quantiser, so bf16's eight bits of it are enough
        return cls(
            sent=torch.zeros(size, dtype=torch.bfloat16, device=device),
            owned=torch.zeros(size // ranks, dtype=torch.bfloat16, device=device),
        )

    def scale(self, factor: float) -> None:
        """Multiply by `factor`, because the gradients are multiplied by it from now on (the loss scale has changed)."""
        self.sent.mul_(factor)
        self.owned.mul_(factor)


def compressed_mean(values: Tensor, residue: Residue, bits: int, group: dist.ProcessGroup) -> Tensor:
    """Return the mean [n] of float32 `values` [n] over the group; all its ranks must call it.

    Adds the residue to `values` in place, and then sets it to the new rounding errors. If any rank has a number that is
    not finite, that block of the mean is NaN on all ranks.
    """
    ranks = dist.get_world_size(group)
    # error feedback: what the last step lost is added before this one is rounded, so errors do not accumulate
    sent = _rounded(values.add_(residue.sent), residue.sent, bits)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean = torch.zeros(len(values) // ranks, device=values.device)
    for part in received.chunk(ranks):  # in the order of the ranks, so that equal blocks have equal sums anywhere
        mean += dequantize(part, bits).view(-1)
    owned = _rounded(mean.div_(ranks).add_(residue.owned), residue.owned, bits)
    gather_single(sent, owned, group=group)
    return dequantize(sent, bits).view(-1)


def _rounded(values: Tensor, lost: Tensor, bits: int) -> Tensor:
    """Return quantised blocks, and set `lost` to their rounding errors; 0 where `values` are not finite, so that one
    overflow does not last."""
    rows = quantize(values.view(-1, BLOCK), bits)
    back = dequantize(rows, bits).view(-1)
    lost.copy_(torch.sub(values, back, out=back).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
    return rows


@dataclass(kw_only=True)
class CompressedReduction:
    """Averages the gradients of a rank's parameters over its data-parallel group, once a step.

    Attributes:
        sizes: number of elements of each gradient.
        kinds: whether each may share blocks with others (PACKED), begins a block (ALIGNED), or is averaged in float32
            (EXACT).
        residues: rounding errors of each bucket.
        scale: the loss scale at the last reduction.
    """

    bits: int
    group: dist.ProcessGroup
    device: torch.device
    sizes: Sequence[int]
    kinds: Sequence[str]
    buckets: list[Bucket] = field(init=False)
    residues: list[Residue] = field(init=False)
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.buckets = [*self._arranged(PACKED), *self._arranged(ALIGNED)]
        self.reset()

    @torch.no_grad()
    def average(self, gradients: Sequence[Tensor], scale: float = 1.0) -> None:
        """Replace the gradients by their means over the group, in place; all its ranks must call it.

        Args:
            gradients: of any shape, in the order of `sizes`.
            scale: the loss scale, by which the gradients are multiplied.
        """
        for residue in self.residues if scale != self.scale else ():
            residue.scale(scale / self.scale)
        self.scale = scale
        flat = [gradient.reshape(-1) for gradient in gradients]  # a view, or a copy if the gradient is not contiguous
        for bucket, residue in zip(self.buckets, self.residues, strict=True):
            values = torch.zeros(bucket.size, device=self.device)
            for piece in bucket.pieces:
                values[piece.offset : piece.offset + piece.length] = _part(flat, piece)
            mean = compressed_mean(values, residue, self.bits, self.group)
            for piece in bucket.pieces:
                _part(flat, piece).copy_(mean[piece.offset : piece.offset + piece.length])
        for numbers, kind in zip(flat, self.kinds, strict=True):
            for part in numbers.split(BUCKET) if kind == EXACT else ():
                exact = part.float()
                dist.all_reduce(exact, group=self.group)
                part.copy_(exact.div_(dist.get_world_size(self.group)))
        for gradient, numbers in zip(gradients, flat, strict=True):
            if not gradient.is_contiguous():
                gradient.copy_(numbers.view_as(gradient))

    @property
    def description(self) -> str:
        """A text that two reductions share if one can continue with the other's `state`."""
        parts = list(self.sizes), list(self.kinds), [bucket.size for bucket in self.buckets]
        return f"{self.bits} bits, {hashlib.sha256(str(parts).encode()).hexdigest()}"

    def state(self) -> dict[str, Tensor]:
        """Return the state to be saved, by name: residues [elements], flat, and the loss scale (a scalar)."""
        found = {"scale": torch.tensor(self.scale)}
        for number, residue in enumerate(self.residues):
            found |= {f"sent.{number}": residue.sent, f"owned.{number}": residue.owned}
        return found

    def set_state(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from a `state` of this rank, tensors of those shapes, in a run with the same gradients and group."""
        self.scale = float(saved["scale"])
        for number, residue in enumerate(self.residues):
            residue.sent.copy_(saved[f"sent.{number}"])
            residue.owned.copy_(saved[f"owned.{number}"])

    def reset(self) -> None:
        """Set all residues to zero."""
        ranks = dist.get_world_size(self.group)
        self.residues = [Residue.none(bucket.size, ranks, self.device) for bucket in self.buckets]

    def _arranged(self, kind: str) -> Iterator[Bucket]:
        order = [index for index, of_gradient in enumerate(self.kinds) if of_gradient == kind]
        return arrange(self.sizes, order, dist.get_world_size(self.group), aligned=kind == ALIGNED)


def _part(flat: Sequence[Tensor], piece: Piece) -> Tensor:
    return flat[piece.index][piece.start : piece.start + piece.length]
