"""The mean of gradients over data-parallel ranks, sent in 8 or 4 bits, with error feedback.

The reduction is that of ZeRO++'s qgZ (Wang et al. 2023, arXiv 2306.10209): every rank quantises its gradients and sends
each other rank a share (all-to-all); the owner of a share sums it in float32, quantises the mean and sends it to all
(all-gather). All ranks read the same bytes, so they hold the same result to the bit. What rounding has taken away is
kept, on the rank that rounded, and added the next time (Seide et al. 2014), at both places.

The result for a block depends on that block alone. A weight that several ranks hold alike, on other stages or on
tensor-parallel ranks, must lie in equal blocks on all of them: so it begins a block of its own, or lies among weights
that they all have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from harness.parallel.gradients.quantize import BLOCK, dequantize, quantize, row_bytes

BUCKET = 1 << 22
"""Numbers that are reduced together: 16 MiB in float32. What is held besides the gradients is a few times as much."""
PACKED, ALIGNED, EXACT = "packed", "aligned", "exact"


@dataclass(frozen=True)
class Piece:
    """A gradient of a bucket, or a part of one.

    Attributes:
        index: its number among all gradients.
        start: its first number in the gradient.
        length: of its numbers.
        offset: where it begins in the bucket.
    """

    index: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together, and the numbers that they take with what fills the last blocks."""

    pieces: tuple[Piece, ...]
    size: int


def arrange(sizes: Sequence[int], order: Sequence[int], ranks: int, *, aligned: bool) -> Iterator[Bucket]:
    """Yield buckets of the gradients `order`, of `sizes`; `aligned`: each begins a block.

    A gradient that is larger than a bucket is cut between two of its blocks.
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
    """What rounding has taken from the gradients of a bucket that this rank sent, and from the means that it made."""

    sent: Tensor
    owned: Tensor

    @classmethod
    def none(cls, size: int, ranks: int, device: torch.device) -> Residue:
        """Return what there is before the first step."""
        # a residue is at most half a step of the quantiser: bf16's eight bits of it are enough
        return cls(
            sent=torch.zeros(size, dtype=torch.bfloat16, device=device),
            owned=torch.zeros(size // ranks, dtype=torch.bfloat16, device=device),
        )

    def scale(self, factor: float) -> None:
        """Follow gradients that are scaled by `factor` from now on."""
        self.sent.mul_(factor)
        self.owned.mul_(factor)


def compressed_mean(values: Tensor, residue: Residue, bits: int, group: dist.ProcessGroup) -> Tensor:
    """Return the mean of float32 `values` (n) over the group, and keep what rounding takes away; all its ranks call it.

    Adds the residue to `values`. Where a rank has a number that is not finite, the mean's block is NaN on all ranks.
    """
    ranks = dist.get_world_size(group)
    sent = _rounded(values.add_(residue.sent), residue.sent, bits)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean = torch.zeros(len(values) // ranks, device=values.device)
    for part in received.chunk(ranks):  # in the order of the ranks, so that equal blocks have equal sums anywhere
        mean += dequantize(part, bits).view(-1)
    owned = _rounded(mean.div_(ranks).add_(residue.owned), residue.owned, bits)
    dist.all_gather_single(sent, owned, group=group)
    return dequantize(sent, bits).view(-1)


def _rounded(values: Tensor, lost: Tensor, bits: int) -> Tensor:
    """Return quantised blocks; `lost` becomes what they lack of `values`: nothing where those are not finite."""
    rows = quantize(values.view(-1, BLOCK), bits)
    back = dequantize(rows, bits).view(-1)
    lost.copy_(torch.sub(values, back, out=back).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
    return rows


@dataclass(kw_only=True)
class CompressedReduction:
    """Averages the gradients of a rank's parameters over its data-parallel group, once a step.

    Attributes:
        sizes: numbers in each gradient.
        kinds: whether each lies beside others (PACKED), begins a block (ALIGNED), or is averaged in float32 (EXACT).
        residues: one for each bucket.
        scale: of the loss, at the last reduction.
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
        """Replace the gradients by their means over the group, in place; all its ranks call it alike.

        `scale`: by which the loss, and so the gradients, are multiplied.
        """
        for residue in self.residues if scale != self.scale else ():
            residue.scale(scale / self.scale)
        self.scale = scale
        flat = [gradient.reshape(-1) for gradient in gradients]  # a view, or a copy of what is not contiguous
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

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on, by name."""
        found = {"scale": torch.tensor(self.scale)}
        for number, residue in enumerate(self.residues):
            found |= {f"sent.{number}": residue.sent, f"owned.{number}": residue.owned}
        return found

    def set_state(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned on this rank of an equal run."""
        self.scale = float(saved["scale"])
        for number, residue in enumerate(self.residues):
            residue.sent.copy_(saved[f"sent.{number}"])
            residue.owned.copy_(saved[f"owned.{number}"])

    def reset(self) -> None:
        """Begin without a residue."""
        ranks = dist.get_world_size(self.group)
        self.residues = [Residue.none(bucket.size, ranks, self.device) for bucket in self.buckets]

    def _arranged(self, kind: str) -> Iterator[Bucket]:
        order = [index for index, of_gradient in enumerate(self.kinds) if of_gradient == kind]
        return arrange(self.sizes, order, dist.get_world_size(self.group), aligned=kind == ALIGNED)


def _part(flat: Sequence[Tensor], piece: Piece) -> Tensor:
    return flat[piece.index][piece.start : piece.start + piece.length]


def wire_share(bits: int) -> float:
    """Return the bytes that a rank sends, as a fraction of those of an all-reduce in float32 (a ring's)."""
    return row_bytes(bits) / (4 * BLOCK)
