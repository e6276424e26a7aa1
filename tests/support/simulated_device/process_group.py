"""A backend of torch.distributed for the simulated device, as strict as NCCL; the ranks of one host exchange files.

Each collective is work on a stream of the group's own. It begins behind what the current stream has been given, and
its result is there for a stream that has waited for it: `wait()`. Until then its output holds garbage. What is
reported, by an error that names the group and the operation:

- a tensor of the host, of another device than the current one, or one that is not contiguous
- members of a group that call another collective, or one with another size, dtype, reduction or root
- collectives of two groups that are under way at once, and were begun in another order by another member of both
- sends and receives of two ranks that cannot meet: they are matched in their order, as in one stream of that pair
- a collective that a rank does not join within the group's timeout, or `SIMULATED_DEVICE_PATIENCE_S` (100): who has
  not come
- one that nobody has waited for when its group ends

A stream that waits for a collective does not stop the host on a GPU. Here all is computed at once, so the host waits
for the others, in `wait()`. `works.PATIENCE_S` says how long: after it the device is stuck, as a GPU's stream is. The
program goes on and enqueues what it likes, and stays where it next waits for the device.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.simulated_device import device, works
from tests.support.simulated_device.works import Call, Collective, Desync, Mail, Nothing, Transfer, Work

Opts = Any
BATCH: list[Transfer] | None = None  # sends and receives that begin together: inside of batch_isend_irecv
LEAVE_OUT: list[str] = []  # names of operations, of which the next one is not begun: a fault to be found
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
}


class Group(dist.ProcessGroup):
    """The members of a group, in one process each."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._set_default_timeout(options.timeout)
        self.id, self.ranks = options.group_id, list(options.global_ranks_in_group) or list(range(size))
        if rank == 0:
            kept = os.environ.get("SIMULATED_DEVICE_FOLDER")
            options.store.set("simccl", tempfile.mkdtemp(prefix="simccl_", dir=kept))
        self.mail = Mail(Path(options.store.get("simccl").decode()), rank)
        self.stream = device.C.new_stream()
        self.streams: dict[int, int] = {}  # of each pair
        self.seq = 0
        self.latest: Collective | None = None
        self.free_at = 0  # when its last collective ends by the device's clock; of each pair, the last transfer
        self.pair_free_at: dict[int, int] = {}
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.queues: dict[int, deque[list[Transfer]]] = {}
        self.posted: dict[tuple[int, bool], int] = {}  # the latest transfer that the other rank knows of
        self.aborted = False
        works.GROUPS.add(self)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return device.BACKEND

    @property
    def group_name(self) -> str:
        return self.id

    @property
    def group_desc(self) -> str:
        return "simulated"

    def _set_group_name(self, name: str) -> None:
        self.id = name

    def _set_group_desc(self, description: str) -> None: ...

    def _get_sequence_number_for_group(self) -> int:
        return self.seq

    def _set_sequence_number_for_group(self) -> None: ...

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = min(timeout, timedelta(seconds=float(os.environ.get("SIMULATED_DEVICE_PATIENCE_S", "100"))))

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device.NAME)]

    @property
    def bound_device_id(self) -> None:
        return None

    @bound_device_id.setter
    def bound_device_id(self, value: object) -> None: ...

    def _checked(self, what: str, tensors: Iterable[Tensor]) -> list[Tensor]:
        found = list(tensors)
        for tensor in found:
            if tensor.device.type != device.NAME:
                raise RuntimeError(f"simccl: {what}: a tensor of the {tensor.device.type}: this backend takes none")
            if tensor.device.index != device.C.current_device():
                current = device.C.current_device()
                raise RuntimeError(f"simccl: {what}: a tensor of {tensor.device} while device {current} is current")
            if not tensor.is_contiguous():
                raise RuntimeError(f"simccl: {what}: tensors must be contiguous")
        return found

    def _call(
        self,
        kind: str,
        signature: object,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        result: Callable[[list[list[Tensor]]], Sequence[Tensor]],
    ) -> Work:
        if kind in LEAVE_OUT:
            LEAVE_OUT.remove(kind)
            return Nothing(self)
        reads, writes = self._checked(kind, reads), self._checked(kind, writes)
        mark = device.C.launch(self.stream, reads, writes, f"{kind} of group {self.id}")
        return Collective(self, Call(kind, str(signature), reads, writes, result), mark)

    def _reduced(self, parts: Sequence[Tensor], op: str) -> Tensor:
        total = reduce(REDUCTIONS[op], parts)
        return total / self._size if op == "AVG" else total

    def allreduce(self, tensors: list[Tensor], opts: Opts = None) -> Work:
        op = _operation(opts)
        return self._call(
            "all_reduce",
            (_shapes(tensors), op),
            tensors,
            tensors,
            lambda parts: [self._reduced(each, op) for each in zip(*parts, strict=True)],
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Opts = None) -> Work:
        root = opts.rootRank
        reads = tensors if root == self._rank else []
        writes = [] if root == self._rank else tensors
        return self._call(
            "broadcast", (_shapes(tensors), root), reads, writes, lambda parts: parts[root] if writes else []
        )

    def reduce(self, tensors: list[Tensor], opts: Opts = None) -> Work:
        op, root = _operation(opts), opts.rootRank
        writes = tensors if root == self._rank else []

        def result(parts: list[list[Tensor]]) -> list[Tensor]:
            return [self._reduced(each, op) for each in zip(*parts, strict=True)] if writes else []

        return self._call("reduce", (_shapes(tensors), op, root), tensors, writes, result)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Opts = None) -> Work:
        def result(parts: list[list[Tensor]]) -> list[Tensor]:
            return [part[index] for index in range(len(outputs)) for part in parts]

        return self._call("all_gather", _shapes(inputs), inputs, [t for each in outputs for t in each], result)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Opts = None) -> Work:
        return self.allgather_into_tensor_coalesced([output], [given])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Opts = None) -> Work:
        def result(parts: list[list[Tensor]]) -> list[Tensor]:
            return [torch.cat([part[i].reshape(-1) for part in parts]) for i in range(len(outputs))]

        return self._call("all_gather", _shapes(inputs), inputs, outputs, result)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Opts = None) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [given], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Opts = None) -> Work:
        op = _operation(opts)

        def result(parts: list[list[Tensor]]) -> list[Tensor]:
            own = [[t.reshape(self._size, -1)[self._rank] for t in part] for part in parts]
            return [self._reduced(each, op) for each in zip(*own, strict=True)]

        return self._call("reduce_scatter", (_shapes(inputs), op), inputs, outputs, result)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Opts = None) -> Work:
        (given,), op = inputs, _operation(opts)
        return self._call(
            "reduce_scatter",
            (_shapes(given), op),
            given,
            outputs,
            lambda parts: [self._reduced([part[self._rank] for part in parts], op)],
        )

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Opts = None
    ) -> Work:
        sizes = input_sizes or [len(given) // self._size] * self._size

        def result(parts: list[list[Tensor]]) -> list[Tensor]:
            # each rank's own sizes came as its second tensor
            rows = [part[0].split(part[1].tolist())[self._rank] for part in parts]
            wanted = output_sizes or [len(output) // self._size] * self._size
            if [len(row) for row in rows] != wanted:
                raise Desync(
                    f"simccl: group {self.id}: all_to_all: rank {self.ranks[self._rank]} expects {wanted} rows"
                )
            return [torch.cat(rows)]

        told = torch.tensor(sizes, device=given.device)
        return self._call("all_to_all", (given.dtype, list(given.shape[1:])), [given, told], [output], result)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Opts = None) -> Work:
        return self._call(
            "all_to_all", inputs[0].dtype, inputs, outputs, lambda parts: [part[self._rank] for part in parts]
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Opts = None) -> Work:
        writes = [t for each in outputs for t in each]
        return self._call(
            "gather",
            (_shapes(inputs), opts.rootRank),
            inputs,
            writes,
            lambda parts: [part[0] for part in parts] if writes else [],
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Opts = None) -> Work:
        root, reads = opts.rootRank, [t for each in inputs for t in each]
        return self._call("scatter", (_shapes(outputs), root), reads, outputs, lambda parts: [parts[root][self._rank]])

    def barrier(self, opts: Opts = None) -> Work:
        one = torch.zeros(1, device=f"{device.NAME}:{device.C.current_device()}")
        work = self._call("barrier", "", [one], [one], lambda parts: parts[0])
        work.wait()  # NCCL's blocks the host
        return work

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._transfer(tensors, peer, sends=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._transfer(tensors, peer, sends=False)

    def _transfer(self, tensors: list[Tensor], peer: int, sends: bool) -> Work:
        kind = "send" if sends else "receive"
        if kind in LEAVE_OUT:
            LEAVE_OUT.remove(kind)
            return Nothing(self)
        (tensor,) = self._checked(kind, tensors)
        if peer not in self.streams:
            self.streams[peer] = device.C.new_stream()
        reads, writes = ([tensor], []) if sends else ([], [tensor])
        mark = device.C.launch(self.streams[peer], reads, writes, f"{kind} of group {self.id}")
        work = Transfer(self, tensor, peer, sends, mark)
        if BATCH is not None:
            BATCH.append(work)
        else:
            self.enqueue([work])
        return work

    def enqueue(self, works: list[Transfer]) -> None:
        """Put transfers with one other rank at the end of its stream, to progress together."""
        self.queues.setdefault(works[0].peer, deque()).append(works)
        self.progress(works[0].peer)

    def progress(self, peer: int) -> None:
        """Let the transfers with a rank meet the other's, those at the head of the stream first."""
        queue = self.queues.get(peer)
        while queue and not works.STUCK:
            for work in queue[0]:
                if not work.is_posted:
                    work.post()
            for work in queue[0]:
                if not work.is_met and work.met():
                    work.is_met = True
                    work.finish()
                    work.is_done = True
            if not all(work.is_done for work in queue[0]):
                self._require_meeting(peer, queue[0])
                return
            queue.popleft()

    def _require_meeting(self, peer: int, head: list[Transfer]) -> None:
        """Report two ranks that both wait for what the other one has behind it."""
        mine, theirs = (self.mail.folder / f"head.{a}.{b}" for a, b in ((self._rank, peer), (peer, self._rank)))
        own = [(work.sends, work.seq) for work in head if not work.is_done]
        partial = mine.with_suffix(f".{os.getpid()}")
        partial.write_bytes(pickle.dumps(own))
        partial.rename(mine)
        if works.PATIENCE_S is not None or not theirs.exists():
            return
        wanted = pickle.loads(theirs.read_bytes())
        if any(work.met() for work in head if not work.is_done):  # it has come meanwhile
            return
        if all(self.posted.get((peer, not sends), 0) < seq for sends, seq in wanted):
            words = [("send" if sends else "receive") + f" {seq}" for sends, seq in wanted]
            raise Desync(f"{head[0]} waits for rank {self.ranks[peer]}, which waits in its {', '.join(words)}")

    def abort(self) -> None:
        self.aborted = True
        if works.STUCK:
            device.C.get_stuck(2)

    def shutdown(self) -> None:
        self.queues.clear()
        keys = [key for key, work in works.NEVER_ASKED.items() if work.group is self]
        left = [works.NEVER_ASKED.pop(key) for key in keys]
        if left and not self.aborted and not works.STUCK:
            raise RuntimeError(f"{left[0]}: nothing has waited for it, and its group ends")


def _operation(opts: Opts) -> str:
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    return next(name for name in REDUCTIONS if op == getattr(dist.ReduceOp, name))


def _shapes(tensors: Sequence[Tensor]) -> list[str]:
    return [f"{tensor.dtype} [{tensor.numel()}]" for tensor in tensors]


def _finish_all() -> None:
    for work in list(works.UNDERWAY.values()):
        work.end()


def register(backend: str, name: str) -> None:
    """Make the backend known to torch.distributed, and have batches of transfers begin together."""
    dist.Backend.register_backend(backend, lambda options, _: Group(options), extended_api=True, devices=[name])
    device.FINISH.append(_finish_all)
    begin = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        global BATCH
        if not operations or not isinstance(operations[0].group or dist.group.WORLD, Group):
            return begin(operations)
        BATCH = []
        try:
            works = begin(operations)
            by_peer: dict[int, list[Transfer]] = {}
            for work in BATCH:
                by_peer.setdefault(work.peer, []).append(work)
        finally:
            BATCH = None
        for each in by_peer.values():
            each[0].group.enqueue(each)
        return works

    dist.batch_isend_irecv = batch_isend_irecv
