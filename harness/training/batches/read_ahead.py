"""Worker processes that read the next steps while the present one computes: torch's DataLoader, a step being one item.

What a step reads is planned beforehand, so the workers change neither order nor numbers. They end when this process
does, however it does; signals to the whole run are left to it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from harness.errors import UserError
from harness.training.process.signals import SIGNALS

Plan = TypeVar("Plan")
Step = TypeVar("Step")

_KILL_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG


@dataclass(frozen=True)
class _Steps(Generic[Plan, Step]):
    """Reads the step of a plan; an error that the user can correct comes back instead."""

    read: Callable[[Plan], Step]

    def __getitem__(self, plan: Plan) -> tuple[Plan, Step | UserError]:
        try:
            return plan, self.read(plan)
        except UserError as error:
            return plan, error


class ReadAhead(Generic[Plan, Step]):
    """Calls `read` on plans in worker processes, ahead of when it is asked for them.

    Args:
        read: reads the step of a plan.
        following: gives a plan and those after it.
        workers: processes; each reads two steps ahead.
    """

    def __init__(self, read: Callable[[Plan], Step], following: Callable[[Plan], Iterable[Plan]], workers: int) -> None:
        self._steps = _Steps(read)
        self._following = following
        self._workers = workers
        self._coming: Iterator[tuple[Plan, Step | UserError]] | None = None

    def __call__(self, plan: Plan) -> Step:
        """Return the step of a plan; where it does not follow the last one, as after a rollback, begin anew."""
        found = next(self._coming, None) if self._coming is not None else None
        if found is None or found[0] != plan:
            self.close()
            self._coming = iter(self._loader(plan))
            found = next(self._coming)
        if isinstance(found[1], UserError):
            raise found[1]
        return found[1]

    def close(self) -> None:
        """End the workers."""
        self._coming = None  # the iterator ends them when nobody holds it

    def _loader(self, plan: Plan) -> DataLoader[tuple[Plan, Step | UserError]]:
        return DataLoader(
            self._steps,  # type: ignore[arg-type]  # torch names its own class, but only indexes
            sampler=self._following(plan),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._workers,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # so that the run's own generator is not moved
            multiprocessing_context="fork",
        )


def _as_it_is(item: Step) -> Step:
    return item


def _begin_worker(_number: int) -> None:
    """Let the signals of the run pass, and end with the process that reads: by its word, or when it is gone."""
    signal.set_wakeup_fd(-1)  # what this process gets is not to be told to its parent
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_end_at_its_parents_word, daemon=True).start()
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end_at_its_parents_word() -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)
