"""Convert between global ranks and coordinates on the axes of parallelism.

A `Layout` holds the sizes of three axes (pipeline, data, tensor) and of two subdivisions: `cp_size` neighbouring data
ranks form the context ranks of one batch rank, and experts may be distributed over tensor and data ranks. The tensor
axis is innermost and the pipeline axis outermost,

    rank = (stage * dp_size + dp_rank) * tp_size + tp_rank.

Needs neither torch nor a process group.
"""

from dataclasses import dataclass
from math import isqrt
from typing import Literal

from harness.config.values.layout_keys import expert_fault
from harness.errors import UserError
from harness.wording import counted

Axis = Literal["pipeline", "data", "context", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "data", "context", "tensor")  # outermost first; context lies within data
AXIS_SIZES = {"pipeline": "pp_size", "data": "dp_size", "context": "cp_size", "tensor": "tp_size", "expert": "ep_size"}


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """A rank's coordinates, each from 0: pipeline stage, data rank, tensor rank.

    `batch_rank` and `cp_rank` split the data rank in two: which samples it reads, and which shard of their tokens it
    keeps.
    """

    stage: int
    dp_rank: int
    tp_rank: int
    batch_rank: int
    cp_rank: int

    def along(self, axis: Axis) -> int:
        return {"pipeline": self.stage, "data": self.dp_rank, "context": self.cp_rank, "tensor": self.tp_rank}[axis]

    def __str__(self) -> str:
        context = f" (context {self.cp_rank})" if self.cp_rank or self.batch_rank != self.dp_rank else ""
        return f"stage {self.stage}, data {self.dp_rank}{context}, tensor {self.tp_rank}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the three axes, whose product is the number of ranks, and of two subdivisions.

    Attributes:
        ep_size: number of ranks of a stage over which whole experts are distributed; 1 if each expert is sharded like
            any other layer. They form a tensor-parallel group, or the groups of several neighbours on the data axis.
        cp_size: number of neighbours on the data axis that read the same samples and hold a shard of the tokens each;
            it divides dp_size. For weights, gradients and checkpoints they are ordinary data-parallel ranks.

    Raises:
        UserError: a size is below 1, or ep_size or cp_size do not fit the axes.
    """

    pp_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    cp_size: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes().items():
            # `true` in a JSON would pass for 1.
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UserError(f"{axis} parallel size is {size!r}: set it to a whole number of at least 1")
        if fault := expert_fault(self.ep_size, self.tp_size, self.dp_size):
            raise UserError(f"{fault[0]}: {fault[1]}")
        if self.dp_size % self.cp_size:
            raise UserError(
                f"context parallel size {self.cp_size} does not divide {counted(self.dp_size, 'data-parallel rank')}"
            )

    @classmethod
    def from_world(
        cls, world_size: int, *, pp_size: int = 1, tp_size: int = 1, ep_size: int = 1, cp_size: int = 1
    ) -> "Layout":
        """Return the layout of `world_size` ranks with these sizes; dp_size is the quotient.

        Raises UserError if pipeline x context x tensor does not divide `world_size`.
        """
        # One copy of the model: its context ranks are on the data axis, which has at least that many ranks.
        model = cls(pp_size=pp_size, tp_size=tp_size, dp_size=cp_size, cp_size=cp_size)
        dp_size, left_over = divmod(world_size, model.world_size)
        if world_size < 1 or left_over or not dp_size:
            raise UserError(_does_not_fit(world_size, model))
        return cls(pp_size=pp_size, tp_size=tp_size, dp_size=dp_size * cp_size, ep_size=ep_size, cp_size=cp_size)

    @property
    def batch_ranks(self) -> int:
        """Number of data ranks that read different samples; dp_size without context parallelism."""
        return self.dp_size // self.cp_size

    @property
    def ep_data_size(self) -> int:
        """Number of neighbours along the data axis over which experts are distributed; tokens are sent between them."""
        return max(self.ep_size // self.tp_size, 1)

    def expert_groups(self) -> list[list[int]]:
        """Return all groups of data-parallel neighbours over which experts are distributed."""
        size = self.ep_data_size
        return [ranks[at : at + size] for ranks in self.groups("data") for at in range(0, len(ranks), size)]

    def expert_copies(self) -> list[list[int]]:
        """Return all groups of ranks that hold the same experts."""
        size = self.ep_data_size
        return [ranks[at::size] for ranks in self.groups("data") for at in range(size)]

    @property
    def world_size(self) -> int:
        return self.pp_size * self.dp_size * self.tp_size

    def sizes(self) -> dict[str, int]:
        """Return axis name -> size, as in `run.json`."""
        return {axis: getattr(self, name) for axis, name in AXIS_SIZES.items()}

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinates of a global rank. IndexError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside the {self.world_size} ranks of {self}")
        # The order of DeepSpeed's PipeModelDataParallelTopology (axes pipe, data, model). Tensor-parallel ranks, which
        # exchange the most, are neighbours, and so mostly on one host.
        rest, tp_rank = divmod(rank, self.tp_size)
        stage, dp_rank = divmod(rest, self.dp_size)
        batch_rank, cp_rank = divmod(dp_rank, self.cp_size)
        return Coordinate(stage=stage, dp_rank=dp_rank, tp_rank=tp_rank, batch_rank=batch_rank, cp_rank=cp_rank)

    def rank(self, *, stage: int, dp_rank: int, tp_rank: int) -> int:
        """Return the global rank at these coordinates. IndexError if they are outside the layout."""
        for axis, index in {"pipeline": stage, "data": dp_rank, "tensor": tp_rank}.items():
            size = self.sizes()[axis]
            if not 0 <= index < size:
                raise IndexError(f"{axis} index {index} is outside 0..{size - 1} of {self}")
        return (stage * self.dp_size + dp_rank) * self.tp_size + tp_rank

    def ranks_along(self, axis: Axis, rank: int) -> list[int]:
        """Return `rank` and the ranks that differ from it only along `axis`, in order. IndexError outside the world."""
        stride = self._stride(axis)
        size = self.sizes()[axis]
        first = rank - (rank // stride % size) * stride
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside the {self.world_size} ranks of {self}")
        return list(range(first, first + size * stride, stride))

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return all groups of ranks along `axis`, sorted by first rank; together they contain every rank once."""
        stride = self._stride(axis)
        size = self.sizes()[axis]
        return [self.ranks_along(axis, rank) for rank in range(self.world_size) if rank // stride % size == 0]

    def stage_ranks(self, stage: int) -> list[int]:
        """Return the ranks of a pipeline stage in order. IndexError for a stage outside the layout."""
        first = self.rank(stage=stage, dp_rank=0, tp_rank=0)
        return list(range(first, first + self.dp_size * self.tp_size))

    def _stride(self, axis: Axis) -> int:
        """Return the difference in global rank between two neighbours along `axis`."""
        # Context ranks are neighbours on the data axis, so their stride is that of data ranks.
        strides = {"tensor": 1, "context": self.tp_size, "data": self.tp_size, "pipeline": self.dp_size * self.tp_size}
        return strides[axis]

    def __str__(self) -> str:
        experts = f" (ep{self.ep_size})" if self.ep_size > 1 else ""
        context = f" (cp{self.cp_size})" if self.cp_size > 1 else ""
        return f"pp{self.pp_size} x dp{self.dp_size}{context} x tp{self.tp_size}{experts}"


def _does_not_fit(world_size: int, model: Layout) -> str:
    """Return the error text for sizes that do not divide the world, with sizes that would."""
    product = model.world_size
    context = f" x context {model.cp_size}" if model.cp_size > 1 else ""
    wanted = f"pipeline {model.pp_size}{context} x tensor {model.tp_size} = {counted(product, 'rank')}"
    text = f"{wanted} do not divide the world of {counted(world_size, 'rank')}"
    if world_size < 1:
        processes = counted(product, "process", "processes")
        return f"a world of {counted(world_size, 'rank')} cannot hold {wanted}: start at least {processes}"
    remedies = []
    for change, kept in (("pipeline", "tensor"), ("tensor", "pipeline")):
        kept_size = model.sizes()[kept] * model.cp_size
        if fits := [size for size in divisors(world_size) if world_size % (size * kept_size) == 0]:
            remedies.append(f"set {change} to {' or '.join(map(str, fits))} with {kept} {kept_size}")
    remedies.append(f"start a multiple of {product} processes")
    return f"{text}: {', or '.join(remedies)}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in reversed(small) if divisor * divisor < number)]
