"""Read the next steps in worker processes while the current step computes: a torch DataLoader whose item is a step.

The samples of each step are planned before it is read, so workers change neither order nor results. Workers end when
this process ends, for whatever reason, and leave signals such as SIGTERM to it.

All tensors of a step arrive in one block of shared memory. Torch would open one file descriptor for each tensor; a
step of many micro-batches exceeds the usual limit of 1,024, and would be lost without an error.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from harness.errors import UserError
from harness.resilience.process.signals import SIGNALS

Plan = TypeVar("Plan")
Step = TypeVar("Step")

_ALIGNED = 64  # bytes, so that vector instructions read each tensor at full speed
_KILL_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Packed:
    """A step as a worker sends it.

    Attributes:
        pickled: the step without its tensors' contents.
        spans: first byte and last + 1 of each tensor's content in `memory`.
        memory: shared memory, uint8 [bytes].
    """

    pickled: bytes
    spans: list[tuple[int, int]]
    memory: Tensor

    def unpacked(self) -> Any:
        """Return the step; its tensors stay in the shared memory."""
        view = self.memory.numpy().data
        buffers = [view[start:stop] for start, stop in self.spans]
        return pickle.loads(self.pickled, buffers=buffers)  # it was written by a process of our own


@dataclass(frozen=True)
class _Steps(Generic[Plan, Step]):
    """The "data set" of the DataLoader: indexed with a plan, it reads and packs that step, or returns its UserError."""

    read: Callable[[Plan], Step]

    def __getitem__(self, plan: Plan) -> tuple[Plan, Packed | UserError]:
        try:
            return plan, _packed(self.read(plan))
        except UserError as error:
            return plan, error


class ReadAhead(Generic[Plan, Step]):
    """Calls `read` on the coming plans in worker processes, before their steps are asked for.

    Args:
        read: reads the step of a plan.
        following: yields a plan and all plans after it.
        workers: number of processes; each reads two steps ahead, as DataLoader does by default.
    """

    def __init__(self, read: Callable[[Plan], Step], following: Callable[[Plan], Iterable[Plan]], workers: int) -> None:
        self._steps = _Steps(read)
        self._following = following
        self._workers = workers
        self._coming: Iterator[tuple[Plan, Packed | UserError]] | None = None

    def __call__(self, plan: Plan) -> Step:
        """Return the step of a plan. Restart the workers if it does not follow the last plan, as after a rollback."""
        found = next(self._coming, None) if self._coming is not None else None
        if found is None or found[0] != plan:
            self.close()
            # Workers inherit the mask. Torch may start threads in them before `_begin_worker`; a signal that any thread
            # leaves unblocked would end its worker.
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                self._coming = iter(self._loader(plan))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            found = next(self._coming)
        if isinstance(found[1], UserError):
            raise found[1]
        step: Step = found[1].unpacked()
        return step

    def close(self) -> None:
        """End the workers."""
        self._coming = None  # DataLoader's iterator ends its workers when it is garbage-collected

    def _loader(self, plan: Plan) -> DataLoader[tuple[Plan, Packed | UserError]]:
        return DataLoader(
            self._steps,  # type: ignore[arg-type]  # torch names its own class, but only indexes
            sampler=self._following(plan),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._workers,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # DataLoader draws a seed; keep the run's global generator out of it
            multiprocessing_context="fork",
        )


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors as numpy arrays: pickle protocol 5 passes their contents out of band, without a copy."""

    def reducer_override(self, value: object) -> Any:
        """Return the call that rebuilds a dense CPU tensor; other values are left to pickle."""
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape), value.requires_grad)


def _tensor(content: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    """Return the tensor of this `shape` whose bytes are `content`."""
    return torch.from_numpy(content).view(dtype).reshape(shape).requires_grad_(requires_grad)


def _packed(step: object) -> Packed:
    """Pack a step into shared memory. UserError if that fails."""
    target = io.BytesIO()
    found = list[pickle.PickleBuffer]()
    _Pickler(target, pickle.HIGHEST_PROTOCOL, buffer_callback=found.append).dump(step)
    contents = [buffer.raw() for buffer in found]
    stops = np.cumsum([-(-content.nbytes // _ALIGNED) * _ALIGNED for content in contents], dtype=np.int64).tolist()
    spans = [(start, start + content.nbytes) for start, content in zip([0, *stops], contents, strict=False)]
    size = max(stops, default=0)
    try:
        memory = torch.empty(size, dtype=torch.uint8).share_memory_()
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"a data loader process has no shared memory for a step of {size / 2**20:,.0f} MiB ({error}): raise "
            "`ulimit -n`, give the container a larger /dev/shm, or use fewer --dataloader_num_workers"
        ) from error
    view = memory.numpy().data
    # The tensors' bytes go to shared memory; only the small pickle is sent through the worker's pipe.
    for (start, stop), content in zip(spans, contents, strict=True):
        view[start:stop] = content
    return Packed(target.getvalue(), spans, memory)


def _as_it_is(item: Step) -> Step:
    return item


def _begin_worker(_number: int) -> None:
    """End this worker with its parent, or when the parent sends a signal. Signals of the launcher stay blocked."""
    signal.set_wakeup_fd(-1)  # inherited by the fork: signals of this process would wake up the parent
    threading.Thread(target=_end_on_parents_signal, daemon=True).start()
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl was called
        os._exit(1)


def _end_on_parents_signal() -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)
