"""Count what a rank sends and holds while it runs, in a dry run or in a real one.

Every operation of torch passes here, collectives too. The size of a message is that of the tensor of an all-reduce,
broadcast, send or recv, of the output of an all-gather, and of the input of a reduce-scatter. Collectives in a group of
one rank are not counted, as they send nothing. Memory is the sum of all storages, each counted once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from harness.parallel.values import Keyword, Operation, Positional
from harness.topology.layout import AXES, Layout

OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
"""The usual name of each of torch's collectives whose internal name is not the usual one with a final underscore."""
POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True, order=True)
class Message:
    """A kind of message: the name of its group, the number of ranks in it, and the operation."""

    group: str
    ranks: int
    operation: str


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A collective, a send or a recv: the ranks of its group, and its size in bytes."""

    operation: str
    ranks: tuple[int, ...]
    size: int


@dataclass
class Traffic:
    """The number of messages of one kind, and their bytes in all."""

    count: int = 0
    size: int = 0


class Ledger(TorchDispatchMode):
    """Counts messages by phase, and the bytes of all tensors that are created while it is entered.

    Attributes:
        live: bytes of the tensors that exist now.
        peak: the largest `live` since `begin_step`.
        marks: phase -> `live` when it first began after `begin_step`.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.marks: dict[str, int] = {}
        self._groups = named_groups(layout, rank)
        self._phase = ""
        self._messages: dict[str, Counter[tuple[Message, int]]] = {}
        self._storages = WeakIdKeyDictionary()

    def begin_step(self) -> None:
        """Start counting a step: forget messages and marks, and start the peak at what is held now."""
        self._messages.clear()
        self.marks = {}
        self.peak = self.live
        self.begin("step")

    def begin(self, phase: str) -> None:
        """Begin a phase, by whose name messages are counted from now on; of `RecvGrad(0)` that is `RecvGrad`."""
        self._phase = phase.partition("(")[0]
        self.marks.setdefault(self._phase, self.live)

    def messages(self, repeated: Mapping[str, int]) -> dict[Message, Traffic]:
        """Return the messages since `begin_step`; those of a phase in `repeated` are multiplied by its number."""
        found: dict[Message, Traffic] = {}
        for phase, counts in self._messages.items():
            for (message, size), count in counts.items():
                traffic = found.setdefault(message, Traffic())
                traffic.count += count * repeated.get(phase, 1)
                traffic.size += count * size * repeated.get(phase, 1)
        return dict(sorted(found.items()))

    def __torch_dispatch__(
        self, func: Operation, _types: object, args: Positional = (), kwargs: Keyword | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count(func.overloadpacket.__name__, args)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and tensor.layout == torch.strided:
                self._hold(tensor)
        return result

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()  # views share it, and it lives as long as the last of them
        if storage in self._storages:
            return
        self._storages[storage] = True
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, size: int) -> None:
        self.live -= size

    def _count(self, name: str, args: Sequence[object]) -> None:
        sent = sent_by(name, args)
        if sent is None:
            return
        if sent.operation in POINT_TO_POINT:
            message = Message("pipeline", 2, sent.operation)
        else:
            message = Message(self._groups.get(sent.ranks, "other"), len(sent.ranks), sent.operation)
        self._messages.setdefault(self._phase, Counter())[message, sent.size] += 1


def sent_by(name: str, args: Sequence[object]) -> Sent | None:
    """Return what an operation of torch's namespace c10d sends; None for a barrier, and in a group of one rank."""
    group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
    operation = OPERATIONS.get(name, name.removesuffix("_"))
    if group is None or operation in ("barrier", "monitored_barrier"):
        return None
    ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
    if len(ranks) == 1:
        return None
    # of inputs and outputs the larger: the output of an all-gather, the input of a reduce-scatter
    size = max(sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args)
    return Sent(operation=operation, ranks=ranks, size=size)


def named_groups(layout: Layout, rank: int) -> dict[tuple[int, ...], str]:
    """Return the name of each group that a rank is in, by the group's ranks.

    Groups of the same ranks have one name; the last of `AXES` wins.
    """
    place = layout.coordinate(rank)
    replica = [r for of_stage in layout.ranks_along("pipeline", rank) for r in layout.ranks_along("tensor", of_stage)]
    named = {tuple(range(layout.world_size)): "world", tuple(sorted(replica)): "model"}
    stage_ranks = layout.stage_ranks(place.stage)
    named.setdefault(tuple(stage_ranks), "stage")
    for name, groups in (("expert", layout.expert_groups()), ("copies", layout.expert_copies())):
        named.setdefault(next(tuple(ranks) for ranks in groups if rank in ranks), name)
    return named | {tuple(layout.ranks_along(axis, rank)): axis for axis in AXES}
