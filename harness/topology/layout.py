"""Who sits where: the arithmetic between a global rank and its place in the three axes of parallelism.

A `Layout` is three sizes. Ranks are numbered with the tensor axis innermost and the pipeline axis outermost,
rank = (stage * data + data_rank) * tensor + tp_rank, the numbering of DeepSpeed's
PipeModelDataParallelTopology (axes pipe, data, model), so that neighbouring ranks, which usually share a
host, share a tensor-parallel group. Nothing here needs torch or a running process group.
"""

from dataclasses import dataclass
from typing import Literal

from harness.config.errors import UserError
from harness.config.wording import counted

Axis = Literal["pipeline", "data", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "data", "tensor")  # outermost first


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """One rank's place in the layout, counted from 0: pipeline stage, data rank, tensor rank."""

    stage: int
    data: int
    tensor: int

    def __str__(self) -> str:
        return f"stage {self.stage}, data {self.data}, tensor {self.tensor}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the three axes; their product is the number of ranks. UserError for a size below 1.

    `expert` is no axis of its own: 1, or the size of the tensor axis where its ranks share out whole experts.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "expert"):
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UserError(f"{axis} parallel size is {size!r}: set it to a whole number of at least 1")

    @classmethod
    def from_world(cls, world_size: int, *, pipeline: int = 1, tensor: int = 1, expert: int = 1) -> "Layout":
        """Give to the data axis what pipeline and tensor leave of `world_size` ranks.

        Raises UserError if pipeline x tensor does not divide the world.
        """
        model = cls(pipeline=pipeline, tensor=tensor)
        data, left_over = divmod(world_size, model.world_size)
        if world_size < 1 or left_over or not data:
            raise UserError(_does_not_fit(world_size, model))
        return cls(pipeline=pipeline, tensor=tensor, data=data, expert=expert)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.data * self.tensor

    def coordinate(self, rank: int) -> Coordinate:
        """The place of a global rank. Raises IndexError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside the {self.world_size} ranks of {self}")
        rest, tensor = divmod(rank, self.tensor)
        stage, data = divmod(rest, self.data)
        return Coordinate(stage=stage, data=data, tensor=tensor)

    def rank(self, *, stage: int, data: int, tensor: int) -> int:
        """The global rank at a place. Raises IndexError for a place outside the layout."""
        for axis, index, size in zip(AXES, (stage, data, tensor), (self.pipeline, self.data, self.tensor), strict=True):
            if not 0 <= index < size:
                raise IndexError(f"{axis} index {index} is outside 0..{size - 1} of {self}")
        return (stage * self.data + data) * self.tensor + tensor

    def ranks_along(self, axis: Axis, rank: int) -> list[int]:
        """The ranks that differ from `rank` along `axis` alone, with `rank` itself, in order of that axis."""
        stride = self._stride(axis)
        size: int = getattr(self, axis)
        first = rank - (rank // stride % size) * stride
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside the {self.world_size} ranks of {self}")
        return list(range(first, first + size * stride, stride))

    def groups(self, axis: Axis) -> list[list[int]]:
        """All groups of ranks along `axis`; together they hold every rank once. Ordered by first rank."""
        stride, size = self._stride(axis), getattr(self, axis)
        return [self.ranks_along(axis, rank) for rank in range(self.world_size) if rank // stride % size == 0]

    def stage_ranks(self, stage: int) -> list[int]:
        """The ranks of one pipeline stage, in order. Raises IndexError for a stage outside the layout."""
        first = self.rank(stage=stage, data=0, tensor=0)
        return list(range(first, first + self.data * self.tensor))

    def bubble(self, micro_batches: int) -> float:
        """The fraction of a step in which a stage waits: (p - 1) / (m + p - 1) for p stages, m micro-batches.

        The same for GPipe (Huang et al. 2019, arXiv:1811.06965, section 2.3) and for 1F1B with a flush, which
        DeepSpeed runs (Narayanan et al. 2021, arXiv:2104.04473, section 2.2, where it stands relative to the
        ideal time, (p - 1) / m). Assumes equal stages. Raises UserError for less than one micro-batch.
        """
        if micro_batches < 1:
            raise UserError(f"{micro_batches} micro-batches a step: set gradient_accumulation_steps to 1 or more")
        return (self.pipeline - 1) / (micro_batches + self.pipeline - 1)

    def _stride(self, axis: Axis) -> int:
        """The distance in global rank between two neighbours along `axis`."""
        strides = {"tensor": 1, "data": self.tensor, "pipeline": self.data * self.tensor}
        return strides[axis]

    def __str__(self) -> str:
        experts = f" (ep{self.expert})" if self.expert > 1 else ""
        return f"pp{self.pipeline} x dp{self.data} x tp{self.tensor}{experts}"


def _does_not_fit(world_size: int, model: Layout) -> str:
    """Say which pipeline and tensor sizes near the wanted ones would fit the world."""
    product = model.world_size
    wanted = f"pipeline {model.pipeline} x tensor {model.tensor} = {counted(product, 'rank')}"
    text = f"{wanted} do not divide the world of {counted(world_size, 'rank')}"
    if world_size < 1:
        processes = counted(product, "process", "processes")
        return f"a world of {counted(world_size, 'rank')} cannot hold {wanted}: start at least {processes}"
    remedies = []
    for change, kept in (("pipeline", "tensor"), ("tensor", "pipeline")):
        kept_size: int = getattr(model, kept)
        if fits := [size for size in _divisors(world_size) if world_size % (size * kept_size) == 0]:
            remedies.append(f"set {change} to {' or '.join(map(str, fits))} with {kept} {kept_size}")
    remedies.append(f"start a multiple of {product} processes")
    return f"{text}: {', or '.join(remedies)}"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
