"""Record what a rank computes and sends in a step: kernels and messages with predicted seconds, by instruction.

Kernels run on one stream, messages on one for each group of ranks. A kernel waits for the messages whose result it
uses, and for those that the program waits for at once. So the side streams of a GPU need not be known: where a program
waits earlier than it has to, or copies on a side stream, the step takes a little longer than here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from harness.dry_run.kernel_time import kernel_of
from harness.dry_run.ledger import POINT_TO_POINT, named_groups, sent_by
from harness.parallel.values import Keyword, Operation, Positional
from harness.planner.hardware import Hardware
from harness.planner.traffic import collective
from harness.topology.layout import Layout

COMPUTE = "compute"
UPDATE = ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep", "LastStep")
"""Instructions whose kernels are the optimizer's."""
BACKWARD = ("BackwardPass", "LastBackward", "InputGradients", "WeightGradients")


@dataclass(frozen=True, kw_only=True)
class Event:
    """A kernel, a message, or a wait of the host for the device (`item`).

    Attributes:
        number: place on the tape.
        stream: `compute`, or the group of a message.
        part: forward, backward, optimizer or communication.
        seconds: predicted time; of a wait of the host 0.
        waits: numbers of the messages whose results it uses.
        blocks: whether the program waits for a message at once, or the host for the device.
    """

    number: int
    name: str
    stream: str
    part: str
    seconds: float
    waits: tuple[int, ...] = ()
    blocks: bool = False

    @property
    def is_host_wait(self) -> bool:
        """Whether the host waits for the device, and the device does nothing."""
        return self.stream == COMPUTE and self.blocks


@dataclass
class TapeSegment:
    """The events of one instruction.

    Attributes:
        chunk: model chunk of the instruction; None if it has none.
    """

    instruction: str
    chunk: int | None = None
    events: list[Event] = field(default_factory=list)


class Tape(TorchDispatchMode):
    """Records while it is entered.

    Attributes:
        hardware: the device that it is predicted for.
        segments: in the order of execution; the first one begins with the step.
    """

    def __init__(self, hardware: Hardware, layout: Layout, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments = [TapeSegment("step")]
        self.hardware, self._rank = hardware, rank
        self._groups = named_groups(layout, rank)
        self._numbers = 0
        self._arriving = WeakIdKeyDictionary()  # storage -> the message that fills it

    def begin(self, instruction: str, chunk: int | None = None) -> None:
        """Begin an instruction, to which all events belong from now on."""
        self.segments.append(TapeSegment(instruction, chunk))

    def __torch_dispatch__(
        self, func: Operation, _types: object, args: Positional = (), kwargs: Keyword | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._send(func, args)
        elif func.name() == "aten::_local_scalar_dense":
            self._note("item", COMPUTE, 0.0, self._waits(args), blocks=True)
        elif kernel := kernel_of(self.hardware, func, args, kwargs or {}, result):
            self._note(kernel.name, COMPUTE, kernel.seconds, self._waits((args, kwargs)))
        return result

    def _send(self, func: Operation, args: Positional) -> None:
        sent = sent_by(func.overloadpacket.__name__, args)
        if sent is None:
            return
        group = self._groups.get(sent.ranks, "other")
        ranks = sent.ranks
        if sent.operation in POINT_TO_POINT:
            peer = next(arg for arg in args if isinstance(arg, int))  # its number in the group
            group = "pipeline"
            ranks = tuple(sorted((self._rank, sent.ranks[peer])))
        seconds = collective(self.hardware, sent.operation, ranks, sent.size)
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}  # noqa: SLF001
        is_sync = named.get("async_op") is False
        number = self._note(sent.operation, group, seconds, self._waits(args), blocks=is_sync)
        if sent.operation != "send":
            for storage in _storages(args[0]):
                self._arriving[storage] = number

    def _note(self, name: str, stream: str, seconds: float, waits: tuple[int, ...], *, blocks: bool = False) -> int:
        number = self._numbers
        self._numbers += 1
        part = self._part() if stream == COMPUTE else "communication"
        event = Event(number=number, name=name, stream=stream, part=part, seconds=seconds, waits=waits, blocks=blocks)
        self.segments[-1].events.append(event)
        return number

    def _part(self) -> str:
        instruction = self.segments[-1].instruction
        if instruction in UPDATE:
            return "optimizer"
        return "backward" if instruction in BACKWARD else "forward"

    def _waits(self, given: object) -> tuple[int, ...]:
        """Return the messages that fill the storages of some tensors; what follows has waited for them, too."""
        if not self._arriving:
            return ()
        return tuple(sorted({self._arriving.pop(storage) for storage in _storages(given) if storage in self._arriving}))


def _storages(value: object) -> Iterable[torch.UntypedStorage]:
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
    return {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}.values()
