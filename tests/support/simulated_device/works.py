"""Collectives and transfers that have begun, and the messages by which the members of a group exchange them."""

from __future__ import annotations

import os
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.support.simulated_device import device
from tests.support.simulated_device.device import host_view

if TYPE_CHECKING:
    from tests.support.simulated_device.clock import Clock
    from tests.support.simulated_device.process_group import Group

GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()
UNDERWAY: dict[int, Work] = {}  # what no stream has waited for, in the order of its beginning
NEVER_ASKED: dict[int, Work] = {}  # whose `wait` or `is_completed` nobody has called
BEGUN_BESIDE: dict[tuple[str, int], set[tuple[str, int]]] = {}  # what was under way when a collective began
PATIENCE_S: float | None = None
Mark = tuple[int, list[int], int]  # the stream, how far it has come, and when the work could begin, in nanoseconds
CLOCK: list[Clock] = []  # the one that runs
STUCK: list[Work] = []  # the first work that this device could not finish


class Desync(RuntimeError):
    """The ranks do not call the same: NCCL would hang, or mix up their data."""


class Mail:
    """Messages between the members of a group: files, each written for one reader, who deletes it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._read: dict[str, Any] = {}

    def post(self, name: str, readers: Sequence[int], content: object) -> None:
        """Write a message for each of the readers; nothing if there are none."""
        if not readers:
            return
        partial = self.folder / f"{os.getpid()}.{time.monotonic_ns()}"
        partial.write_bytes(pickle.dumps(content, protocol=5))
        for reader in readers:
            ready = partial.with_suffix(f".{reader}")
            ready.hardlink_to(partial)
            ready.rename(self.folder / f"{name}.{self.rank}.{reader}")
        partial.unlink()

    def peek(self, name: str, sender: int) -> Any | None:
        """Return a message that has arrived, which can be asked for again; None if it has not."""
        key = f"{name}.{sender}.{self.rank}"
        if key not in self._read:
            try:
                self._read[key] = pickle.loads((self.folder / key).read_bytes())
            except FileNotFoundError:
                return None
            (self.folder / key).unlink()
        return self._read[key]

    def forget(self, name: str, sender: int) -> None:
        """Let go of a message that was read."""
        self._read.pop(f"{name}.{sender}.{self.rank}", None)


class Work(torch._C._distributed_c10d.Work):
    """A collective, or a transfer, that has begun."""

    def __init__(self, group: Group, what: str, mark: Mark, held: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.group, self.what, self.agent, self.clock, self.ready_at = group, what, *mark
        self.held = list(held)  # NCCL's work keeps its tensors until it was waited for
        self.is_done = False
        UNDERWAY[id(self)] = NEVER_ASKED[id(self)] = self

    def ready(self) -> bool:
        """Whether all that it needs from others has come; lets it progress."""
        raise NotImplementedError

    def finish(self) -> None:
        """Fill the results."""
        raise NotImplementedError

    def missing(self) -> str:
        """Say who has not come."""
        raise NotImplementedError

    def complete(self) -> None:
        """Wait until the result is there; the device may get stuck instead."""
        if self.is_done or STUCK:
            return
        begun, pause = time.monotonic(), 2e-5
        while not self.ready():
            for group in list(GROUPS):  # the streams of other groups go on meanwhile
                for peer in list(group.queues):
                    group.progress(peer)
            waited = time.monotonic() - begun
            if self.group.aborted:
                raise RuntimeError(f"{self}: the communicator was aborted")
            if PATIENCE_S is not None and waited > PATIENCE_S:
                STUCK.append(self)
                device.C.get_stuck(1)
                return
            if waited > self.group.timeout.total_seconds():
                raise RuntimeError(f"{self}: timeout after {waited:.0f} s: {self.missing()}")
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-3)
        if not self.is_done:  # a transfer is finished by what lets it progress
            self.finish()
            self.is_done = True

    def ends(self, starts: Iterable[int], seconds: float) -> None:
        """Note when it ends by the device's clock: `seconds` after the last of its members is there."""
        start = max(starts)
        self.clock[device.TIME] = start + round(seconds * 1e9)
        device.C.end_at(self.agent, self.clock[device.TIME])
        if CLOCK:
            CLOCK[-1].took(self.what, self.agent, start, self.clock[device.TIME])

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        NEVER_ASKED.pop(id(self), None)
        self.end()
        return True

    def end(self) -> None:
        """Wait for the result and let go of the tensors."""
        self.complete()
        UNDERWAY.pop(id(self), None)
        device.C.wait(self.clock)
        self.held.clear()

    def is_completed(self) -> bool:
        done = self.is_done or (not STUCK and self.ready())
        if done:
            self.complete()
            UNDERWAY.pop(id(self), None)
            NEVER_ASKED.pop(id(self), None)
            device.C.host_knows([0 if agent == device.TIME else past for agent, past in enumerate(self.clock)])
        return done

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.held)
        return future

    def __str__(self) -> str:
        return f"simccl: group {self.group.id}: {self.what}"


class Collective(Work):
    """One that all members of a group join."""

    def __init__(self, group: Group, call: Call, mark: Mark) -> None:
        group.seq += 1
        self.seq, self.call = group.seq, call
        super().__init__(group, f"{call.kind} {group.seq} {call.signature}", mark, [*call.reads, *call.writes])
        self.others = [rank for rank in range(group.size()) if rank != group.rank()]
        self.found: dict[int, Message] = {}
        beside = [
            (work.group.id, work.seq)
            for work in UNDERWAY.values()
            if isinstance(work, Collective)
            and work.group is not group
            and not device.C.has_waited(work.agent, work.clock)
        ]
        self.beside = BEGUN_BESIDE[group.id, self.seq] = set(beside)
        self.own = [host_view(tensor).clone() for tensor in call.reads]
        for tensor in call.writes:
            _spoil(tensor)
        self.before, group.latest = group.latest, self
        size = max(sum(tensor.nbytes for tensor in tensors) for tensors in (call.reads, call.writes))
        self.seconds = CLOCK[-1].seconds(call.kind, group.ranks, size) if CLOCK else 0.0
        if not STUCK:
            tensors = [_packed(tensor) for tensor in self.own]
            message = Message(call.kind, call.signature, beside, tensors, self.ready_at, self.seconds)
            group.mail.post(f"c{self.seq}", self.others, message)

    def ready(self) -> bool:
        for rank in self.others:
            if rank in self.found:
                continue
            message = self.group.mail.peek(f"c{self.seq}", rank)
            if message is None:
                return False
            if not self._agrees(rank, message):
                return False
            self.group.mail.forget(f"c{self.seq}", rank)
            self.found[rank] = message
        return True

    def _agrees(self, rank: int, message: Message) -> bool:
        own = (self.call.kind, self.call.signature)
        if (message.kind, message.signature) != own:
            if PATIENCE_S is not None:  # as NCCL: it hangs
                return False
            theirs = f"{message.kind} {message.signature}"
            raise Desync(f"{self}: rank {self.group.ranks[rank]} calls {theirs} at its place")
        for other in message.beside:
            if (self.group.id, self.seq) in BEGUN_BESIDE.get(other, ()):
                raise Desync(
                    f"{self}: rank {self.group.ranks[rank]} has begun collective {other[1]} of group {other[0]} before "
                    f"it, rank {self.group.ranks[self.group.rank()]} after it, and neither has waited in between"
                )
        return True

    def finish(self) -> None:
        parts = [
            self.own if rank == self.group.rank() else [_unpacked(*tensor) for tensor in self.found[rank].tensors]
            for rank in range(self.group.size())
        ]
        for tensor, value in zip(self.call.writes, self.call.result(parts), strict=True):
            host_view(tensor).copy_(value.reshape(tensor.shape))
        if self.before is not None:  # of one group, in one stream: it has ended, too
            self.before.complete()
        self.ends(
            [self.ready_at, self.group.free_at, *(message.ready_at for message in self.found.values())],
            max([self.seconds, *(message.seconds for message in self.found.values())]),
        )
        self.before, self.group.free_at = None, self.clock[device.TIME]

    def missing(self) -> str:
        here = [self.group.ranks[rank] for rank in self.others if rank not in self.found]
        return f"ranks {here} have not joined"


@dataclass(frozen=True)
class Message:
    """What a rank says to a collective, or sends."""

    kind: str
    signature: str
    beside: list[tuple[str, int]] = field(default_factory=list)
    tensors: list[tuple[torch.dtype, list[int], bytes]] = field(default_factory=list)
    ready_at: int = 0  # when this rank could begin, in nanoseconds of the device's clock
    seconds: float = 0.0


@dataclass(frozen=True)
class Call:
    """A collective as one rank calls it.

    `signature` must be the same on all ranks; `result` makes the outputs of what each rank has given.
    """

    kind: str
    signature: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    result: Callable[[list[list[Tensor]]], Sequence[Tensor]]


class Transfer(Work):
    """A send or a receive. Those of two ranks meet in the order in which each of them has begun them."""

    def __init__(self, group: Group, tensor: Tensor, peer: int, sends: bool, mark: Mark) -> None:
        self.peer, self.sends, self.tensor = peer, sends, tensor
        counter = group.sent if sends else group.received
        counter[peer] = counter.get(peer, 0) + 1
        self.seq = counter[peer]
        self.signature = f"{tensor.dtype} [{tensor.numel()}]"
        towards = f"to rank {group.ranks[peer]}" if sends else f"from rank {group.ranks[peer]}"
        super().__init__(
            group, f"{'send' if sends else 'receive'} {self.seq} {towards}, {self.signature}", mark, [tensor]
        )
        self.is_posted = False
        pair = sorted((group.ranks[group.rank()], group.ranks[peer]))
        self.seconds = CLOCK[-1].seconds("send", pair, tensor.nbytes) if CLOCK else 0.0
        self.value = host_view(tensor).clone() if sends else None
        if not sends:
            _spoil(tensor)

    def post(self) -> None:
        """Let the other rank know, once this is first in its stream."""
        self.is_posted = True
        self.group.posted[self.peer, self.sends] = self.seq
        tensors = [] if self.value is None else [_packed(self.value)]
        self.ready_at = max(self.ready_at, self.group.pair_free_at.get(self.peer, 0))
        message = Message("", self.signature, tensors=tensors, ready_at=self.ready_at, seconds=self.seconds)
        self.group.mail.post(f"{self._name(self.sends)}", [self.peer], message)

    def _name(self, sends: bool) -> str:
        return f"{'s' if sends else 'r'}{self.seq}"

    def met(self) -> bool:
        """Whether the other rank's part is there, and the same."""
        message = self.group.mail.peek(self._name(not self.sends), self.peer)
        if message is None:
            return False
        if message.signature != self.signature:
            if PATIENCE_S is not None:
                return False
            raise Desync(f"{self}: rank {self.group.ranks[self.peer]} has {message.signature} at its place")
        return True

    def ready(self) -> bool:
        self.group.progress(self.peer)
        return self.is_done or self.is_met

    is_met = False

    def finish(self) -> None:
        message = self.group.mail.peek(self._name(not self.sends), self.peer)
        assert message is not None  # it has met
        if not self.sends:
            (packed,) = message.tensors
            host_view(self.tensor).copy_(_unpacked(*packed).reshape(self.tensor.shape))
        self.ends([self.ready_at, message.ready_at], max(self.seconds, message.seconds))
        free_at = self.group.pair_free_at
        free_at[self.peer] = max(free_at.get(self.peer, 0), self.clock[device.TIME])
        self.group.mail.forget(self._name(not self.sends), self.peer)

    def missing(self) -> str:
        first = [str(work) for work in self.group.queues[self.peer][0]] if self.group.queues.get(self.peer) else []
        return f"rank {self.group.ranks[self.peer]} has not come; first in the stream of this pair: {first}"


class Nothing(Work):
    """A collective that was left out."""

    def __init__(self, group: Group) -> None:
        super().__init__(group, "left out", (0, [], 0))

    def ready(self) -> bool:
        return True

    def finish(self) -> None: ...


def _spoil(tensor: Tensor) -> None:
    """Fill what a collective is about to write with garbage."""
    host_view(tensor).reshape(-1).view(torch.uint8).fill_(0x7F)


def _packed(tensor: Tensor) -> tuple[torch.dtype, list[int], bytes]:
    flat = tensor.contiguous().reshape(-1)
    return tensor.dtype, list(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def _unpacked(dtype: torch.dtype, shape: list[int], content: bytes) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)
