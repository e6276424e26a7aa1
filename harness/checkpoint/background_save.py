"""Save what a run needs to go on, while it goes on.

The step that saves waits only until each rank has copied what it holds. A thread of each rank then writes its part and
waits for the disk.

The threads never communicate: a collective of theirs could run between those of the training step in another order on
each rank, and hang. They work in phases instead. The main threads start the next phase when all ranks have ended the
last, which they learn where ranks agree after a step anyway. Files exist before ranks write to them, all is written
before it is hashed, and the manifest and the name come last. Older checkpoints then lose their names, and are removed
while the run goes on.

The memory for the copies is allocated at the first save and kept: fresh memory costs several times what a copy costs.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from harness.checkpoint.atomic import room
from harness.checkpoint.directories import Files, TrainingProgress, contents, finish, partial_name, prune, remove
from harness.checkpoint.integrity import newest
from harness.checkpoint.run_lock import lock_directory
from harness.checkpoint.tensors.local_shard import LocalShard
from harness.checkpoint.tensors.tensor_writer import OpenFiles
from harness.checkpoint.tensors.whole_tensors import PlannedFiles, plan_tensors
from harness.checkpoint.training_state import EngineState, describe, write_residue
from harness.errors import UserError, lacks_inodes
from harness.topology.agreement import all_or_none, value_of_first, values_of_all

ALIGNMENT = 64
NO_MEMORY = "has no memory for it"


class KeptBuffer:
    """One buffer for the copies of all tensors; pinned where they come from an accelerator."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[Tensor], helper: Executor) -> list[Tensor]:
        """Return copies in the shapes and dtypes of `tensors`; they last until the next call. `helper` is idle."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_device)
        starts = itertools.accumulate(sizes, initial=0)
        copies = [
            self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for at, tensor in zip(starts, tensors, strict=False)
        ]
        if on_device:
            _fill(copies, tensors)
            get_accelerator().synchronize()
        else:
            other_half = helper.submit(_fill, copies[1::2], tensors[1::2])
            _fill(copies[::2], tensors[::2])
            other_half.result()
        return copies


@torch.no_grad()
def _fill(copies: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)


T = TypeVar("T")

Phases: TypeAlias = Generator[Callable[[], object], Any, list[Path]]
"""What the thread of this rank does, one call after the other; the result of each is sent back to the generator, which
returns the folders to be removed."""
_NUMBERS = itertools.count()


class NotSaved(UserError):
    """A checkpoint could not be written."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the checkpoints of a run go.

    Attributes:
        keep: how many newest checkpoints remain, the best one counted; None for all.
        best: the checkpoint that remains in any case.
        model_only: whether to leave out what the optimizer keeps.
        write_others: called on rank 0 with the folder of a checkpoint, to add files to it.
    """

    output_dir: Path
    keep: int | None
    best: Path | None = None
    model_only: bool = False
    write_others: Callable[[Path], None] | None = None


class Writer:
    """The thread of this rank that writes, and the memory that it writes from; used for one checkpoint at a time."""

    def __init__(self) -> None:
        self._buffer = KeptBuffer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def run(self, phase: Callable[[], T]) -> Future[T]:
        """Start `phase` in the thread."""
        return self._thread.submit(phase)

    def wait(self) -> None:
        """Wait until the thread has done everything it was given."""
        self.run(lambda: None).result()

    def copied(self, files: Sequence[tuple[str, list[LocalShard]]]) -> list[tuple[str, list[LocalShard]]]:
        """Return the shards with copies of the values that this rank writes; others are not copied."""
        owned = [held for _, tensors in files for held in tensors if held.owned]
        copies = iter(self._buffer.copy([held.values for held in owned], self._thread))
        return [
            (stem, [replace(held, values=next(copies)) if held.owned else held for held in tensors])
            for stem, tensors in files
        ]


class BackgroundSave:
    """A checkpoint that is being written; all ranks make it together.

    Attributes:
        number: how many saves this process had begun before; the same on all ranks.
        step: its step.
        path: where it will be.
    """

    def __init__(
        self, state: EngineState, target: Target, progress: TrainingProgress, writer: Writer, *, copy: bool = True
    ) -> None:
        """Copy what this rank holds and begin to write it; raises NotSaved on all ranks if that fails.

        Without a copy, nothing that is saved may change until the checkpoint is whole.
        """
        writer.wait()  # its thread may still remove what the last save has replaced
        self.number, self.step = next(_NUMBERS), progress.step
        self.path = target.output_dir / f"checkpoint-{progress.step}"
        self._folder = target.output_dir / partial_name(progress.step)
        self._first, self._writer, self._one_host = state.groups.rank == 0, writer, state.one_host
        files, progress = state.stored(progress)
        if target.model_only:
            files = [(stem, held) for stem, held in files if stem == state.stem]
            progress = replace(progress, optimizer_states=[], model_only=True)
        one_file = {state.stem} if state.adapters else set()
        self._plans: list[PlannedFiles] = []
        self._plans = [
            plan_tensors(self._folder, stem, held, state.groups, one_file=stem in one_file)
            for stem, held in (self._try(lambda: writer.copied(files)) if copy else files)
        ]
        self._residue: Callable[[], None] = lambda: None
        if state.compression is not None and not target.model_only:
            copied = {name: tensor.to("cpu", copy=True) for name, tensor in state.compression.state().items()}
            description = describe(state.compression, str(state.groups.layout))
            self._residue = partial(write_residue, self._folder, copied, description)
        self._try(lambda: self._open_folder(target))
        self._phases = self._write(target, progress)
        self._running = writer.run(next(self._phases))

    @property
    def is_busy(self) -> bool:
        """Whether the thread of this rank is at work."""
        return not self._running.done()

    def wait(self, seconds: float) -> None:
        """Wait some seconds for the thread of this rank."""
        wait([self._running], max(0.0, seconds))

    def advance(self) -> bool:
        """Wait for the running phase on all ranks, and start the next; return whether the checkpoint is whole.

        All ranks call it.

        Raises:
            NotSaved: on all ranks: the files cannot be written. Older checkpoints are as they were.
        """
        result = self._try(self._running.result)
        try:
            self._running = self._writer.run(self._phases.send(result))
        except StopIteration as end:
            self._writer.run(partial(remove, end.value))
            return True
        return False

    def finish(self) -> Path:
        """Wait until the checkpoint is whole, as `advance`; return its directory."""
        while not self.advance():
            pass
        return self.path

    def _write(self, target: Target, progress: TrainingProgress) -> Phases:
        """Yield the phases of this rank, in the order in which all ranks go through them."""
        yield self._create_files
        with OpenFiles(several_hosts=not self._one_host) as opened:
            yield lambda: self._write_values(opened)
            share = yield lambda: self._hash_and_sync(opened)
        files = {name: file for part in values_of_all(share) for name, file in part.items()}

        def end() -> list[Path]:
            finish(target.output_dir, progress, files)
            kept = newest(target.output_dir, target.keep, progress.step)
            if kept and target.best is not None and target.best.is_dir() and target.best not in kept:
                kept = kept[: max(len(kept) - 1, 1)]
            return prune(target.output_dir, kept, target.best)

        removable: list[Path] = yield end if self._first else list
        return removable

    def _create_files(self) -> None:
        for plan in self._plans:
            plan.create()

    def _write_values(self, opened: OpenFiles) -> None:
        for plan in self._plans:
            plan.write(opened)
        self._residue()
        if not self._one_host:  # a shared file system shows other hosts what is on its disk
            opened.sync()

    def _hash_and_sync(self, opened: OpenFiles) -> Files:
        """Return the checksums of this rank's share of the files, taken while the disk writes what is in memory."""
        with ThreadPoolExecutor(1) as beside:
            synced = beside.submit(opened.sync)
            share = contents(self._folder, dist.get_rank(), dist.get_world_size())
            synced.result()
        return share

    def _open_folder(self, target: Target) -> None:
        if self._first:
            lock_directory(target.output_dir)
            shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed while it wrote
            self._folder.mkdir(parents=True)
            if target.write_others is not None:
                target.write_others(self._folder)

    def _try(self, action: Callable[[], T]) -> T:
        """Return what `action` returns if it succeeds on all ranks; else remove what is written, raise NotSaved."""
        try:
            return all_or_none(lambda: _in_memory(action))
        except UserError as error:
            text = str(error)
            if self._first:
                # bytes are counted when the files of this checkpoint are gone, but inodes are free again then
                full = room(self._folder.parent) if lacks_inodes(self._folder) else ""
                shutil.rmtree(self._folder, ignore_errors=True)
                if NO_MEMORY not in text:
                    text += f" ({full or _room(self._plans, self._folder)})"
            raise NotSaved(value_of_first(text)) from error


def _in_memory(action: Callable[[], T]) -> T:
    """Return what `action` returns; UserError, not a crash, if this host lacks the memory: training can still go on."""
    try:
        return action()
    except MemoryError as error:
        raise UserError(f"rank {dist.get_rank()} {NO_MEMORY}: {error or 'out of memory'}") from error
    except RuntimeError as error:
        text = str(error)  # raised by torch's allocator, or where a thread cannot be started
        if not any(words in text for words in ("can't allocate memory", "out of memory", "can't start new thread")):
            raise
        lines = text.strip().splitlines()
        raise UserError(f"rank {dist.get_rank()} {NO_MEMORY}: {lines[0] if lines else text}") from error


def _room(plans: Sequence[PlannedFiles], folder: Path) -> str:
    """Say how much room a checkpoint needs, and how much there is."""
    return f"it needs {sum(plan.nbytes for plan in plans):,} bytes, {room(folder.parent)}"
