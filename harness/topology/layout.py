"""Who sits where: the arithmetic between a global rank and its place in the axes of parallelism.

A `Layout` is the sizes of three axes, and of what divides two of them: `cp_size` neighbouring data ranks are the
context ranks of one data reader; experts may be shared out over the tensor axis. Ranks are numbered with the tensor
axis innermost and the pipeline axis outermost, rank = (stage * dp_size + dp_rank) * tp_size + tp_rank, the numbering of
DeepSpeed's PipeModelDataParallelTopology (axes pipe, data, model), so that neighbouring ranks, which usually share a
host, share a tensor-parallel group. Nothing here needs torch or a running process group.
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
    """One rank's place in the layout, counted from 0: pipeline stage, data rank, tensor rank.

    `reader` and `cp_rank` are the data rank once more: which samples it reads, and which stretch of them it keeps.
    """

    stage: int
    dp_rank: int
    tp_rank: int
    reader: int
    cp_rank: int

    def along(self, axis: Axis) -> int:
        """Return the place along one axis."""
        return {"pipeline": self.stage, "data": self.dp_rank, "context": self.cp_rank, "tensor": self.tp_rank}[axis]

    def __str__(self) -> str:
        context = f" (context {self.cp_rank})" if self.cp_rank or self.reader != self.dp_rank else ""
        return f"stage {self.stage}, data {self.dp_rank}{context}, tensor {self.tp_rank}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the three axes; their product is the number of ranks. UserError for a size below 1.

    `ep_size` is no axis of its own: the ranks of a stage among which whole experts are dealt, 1 where each expert is
    cut like any other layer. They are those of a tensor-parallel group, or of several neighbours along the data axis.
    UserError where they are not.

    Neither is `cp_size`, which divides `dp_size`: so many neighbours on the data axis read the same samples and keep a
    stretch of the tokens each. For weights, gradients and checkpoints they are data ranks as all others.
    """

    pp_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    cp_size: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes().items():
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
        """Give to the data axis what pipeline and tensor leave of `world_size` ranks.

        Raises UserError if pipeline x context x tensor does not divide the world.
        """
        model = cls(pp_size=pp_size, tp_size=tp_size, dp_size=cp_size, cp_size=cp_size)
        dp_size, left_over = divmod(world_size, model.world_size)
        if world_size < 1 or left_over or not dp_size:
            raise UserError(_does_not_fit(world_size, model))
        return cls(pp_size=pp_size, tp_size=tp_size, dp_size=dp_size * cp_size, ep_size=ep_size, cp_size=cp_size)

    @property
    def readers(self) -> int:
        """How many data ranks read different samples: the others keep another stretch of the same ones."""
        return self.dp_size // self.cp_size

    @property
    def ep_data_size(self) -> int:
        """The number of neighbours along the data axis among which experts are dealt; their tokens travel."""
        return max(self.ep_size // self.tp_size, 1)

    def expert_groups(self) -> list[list[int]]:
        """All groups of data-parallel neighbours among which experts are dealt."""
        size = self.ep_data_size
        return [ranks[at : at + size] for ranks in self.groups("data") for at in range(0, len(ranks), size)]

    def expert_copies(self) -> list[list[int]]:
        """All groups of ranks that hold the same experts."""
        size = self.ep_data_size
        return [ranks[at::size] for ranks in self.groups("data") for at in range(size)]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pp_size * self.dp_size * self.tp_size

    def sizes(self) -> dict[str, int]:
        """Return the sizes by the names of their axes, as `run.json` holds them."""
        return {axis: getattr(self, name) for axis, name in AXIS_SIZES.items()}

    def coordinate(self, rank: int) -> Coordinate:
        """Return the place of a global rank. Raises IndexError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside the {self.world_size} ranks of {self}")
        rest, tp_rank = divmod(rank, self.tp_size)
        stage, dp_rank = divmod(rest, self.dp_size)
        reader, cp_rank = divmod(dp_rank, self.cp_size)
        return Coordinate(stage=stage, dp_rank=dp_rank, tp_rank=tp_rank, reader=reader, cp_rank=cp_rank)

    def rank(self, *, stage: int, dp_rank: int, tp_rank: int) -> int:
        """Return the global rank at a place. Raises IndexError for a place outside the layout."""
        for axis, index in {"pipeline": stage, "data": dp_rank, "tensor": tp_rank}.items():
            size = self.sizes()[axis]
            if not 0 <= index < size:
                raise IndexError(f"{axis} index {index} is outside 0..{size - 1} of {self}")
        return (stage * self.dp_size + dp_rank) * self.tp_size + tp_rank

    def ranks_along(self, axis: Axis, rank: int) -> list[int]:
        """Return the ranks that differ from `rank` along `axis` alone, with `rank` itself, in order of that axis."""
        stride = self._stride(axis)
        size = self.sizes()[axis]
        first = rank - (rank // stride % size) * stride
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside the {self.world_size} ranks of {self}")
        return list(range(first, first + size * stride, stride))

    def groups(self, axis: Axis) -> list[list[int]]:
        """All groups of ranks along `axis`; together they hold every rank once. Ordered by first rank."""
        stride, size = self._stride(axis), self.sizes()[axis]
        return [self.ranks_along(axis, rank) for rank in range(self.world_size) if rank // stride % size == 0]

    def stage_ranks(self, stage: int) -> list[int]:
        """Return the ranks of one pipeline stage, in order. Raises IndexError for a stage outside the layout."""
        first = self.rank(stage=stage, dp_rank=0, tp_rank=0)
        return list(range(first, first + self.dp_size * self.tp_size))

    def _stride(self, axis: Axis) -> int:
        """Return the distance in global rank between two neighbours along `axis`."""
        strides = {
            "tensor": 1,
            "context": self.tp_size,
            "data": self.tp_size,
            "pipeline": self.dp_size * self.tp_size,
        }
        return strides[axis]

    def __str__(self) -> str:
        experts = f" (ep{self.ep_size})" if self.ep_size > 1 else ""
        context = f" (cp{self.cp_size})" if self.cp_size > 1 else ""
        return f"pp{self.pp_size} x dp{self.dp_size}{context} x tp{self.tp_size}{experts}"


def _does_not_fit(world_size: int, model: Layout) -> str:
    """Say which pipeline and tensor sizes near the wanted ones would fit the world."""
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
    """Return the divisors of a number, ascending."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in reversed(small) if divisor * divisor < number)]
