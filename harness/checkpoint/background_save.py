"""Save the state of a run in the background while it trains.

The step that saves waits only until each rank has copied its state. A thread on each rank then writes its shards and
waits for the disk.

The threads never communicate: their collectives could interleave with those of the training step in a different order
on each rank, and hang. Instead they work in phases. The main threads start the next phase when all ranks have finished
the last one, as the all-reduce after each step tells them. The phases: create the files, write them, hash them, then
write the manifest and rename the folder. Checkpoints beyond the limit are then renamed, and deleted while training
continues.

The memory for the copies is allocated at the first save and kept: allocating it costs several times as much as copying.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from harness.atomic import room
from harness.checkpoint.directories import (
    Files,
    TrainingProgress,
    contents,
    finish,
    finished_name,
    partial_name,
    prune,
    remove,
)
from harness.checkpoint.integrity import newest
from harness.checkpoint.run_lock import lock_directory
from harness.checkpoint.tensors.local_shard import LocalShard
from harness.checkpoint.tensors.not_saved import NO_MEMORY, NotSaved, all_save
from harness.checkpoint.tensors.tensor_writer import OpenFiles
from harness.checkpoint.tensors.whole_tensors import PlannedFiles, plan_tensors
from harness.checkpoint.training_state import EngineState, describe, write_residue
from harness.errors import lacks_inodes
from harness.topology.agreement import all_gather_object, broadcast_object

# A cache line, and a multiple of every dtype's size in bytes, so that views of the buffer are valid.
ALIGNMENT = 64
T = TypeVar("T")

Phases: TypeAlias = Generator[Callable[[], object], Any, list[Path]]
"""Yields the calls of this rank's thread, one per phase; receives each result, and returns the folders to delete."""
_NUMBERS = itertools.count()


class KeptBuffer:
    """One buffer for the copies of all tensors, pinned if they come from an accelerator."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[Tensor], helper: Executor) -> list[Tensor]:
        """Copy `tensors` into the buffer; the copies are valid until the next call. The `helper` copies half."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_device)
        # One start more than there are tensors: the end of the last.
        starts = itertools.accumulate(sizes, initial=0)
        copies = [
            self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for at, tensor in zip(starts, tensors, strict=False)
        ]
        if on_device:
            _fill(copies, tensors)
            # The copies are asynchronous, and the next step changes their sources.
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


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a run's checkpoints are saved, and which are kept.

    Attributes:
        keep: number of checkpoints to keep, including the best one; None keeps all.
        best: a checkpoint that is always kept.
        model_only: whether to leave out the optimizer states.
        write_others: called on rank 0 with the folder of a new checkpoint, to add files to it.
    """

    output_dir: Path
    keep: int | None
    best: Path | None = None
    model_only: bool = False
    write_others: Callable[[Path], None] | None = None


class Writer:
    """The writing thread of this rank and its buffer; used for one checkpoint at a time."""

    def __init__(self) -> None:
        self._buffer = KeptBuffer()
        # A single thread, so that a phase begins only when older checkpoints have been deleted.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def run(self, phase: Callable[[], T]) -> Future[T]:
        return self._thread.submit(phase)

    def wait(self) -> None:
        """Wait until the thread has done all queued work."""
        self.run(lambda: None).result()

    def copied(self, files: Sequence[tuple[str, list[LocalShard]]]) -> list[tuple[str, list[LocalShard]]]:
        """Copy the shards' values, except those that another rank writes."""
        owned = [held for _, tensors in files for held in tensors if held.owned]
        copies = iter(self._buffer.copy([held.values for held in owned], self._thread))
        return [
            (stem, [replace(held, values=next(copies)) if held.owned else held for held in tensors])
            for stem, tensors in files
        ]


class BackgroundSave:
    """A checkpoint being written by all ranks.

    Attributes:
        number: number of earlier saves of this process, equal on all ranks.
        step: the checkpoint's step.
        path: the checkpoint's folder, once it is complete.
    """

    def __init__(
        self, state: EngineState, target: Target, progress: TrainingProgress, writer: Writer, *, copy: bool = True
    ) -> None:
        """Copy the state of this rank and begin to write it; all ranks call it.

        With `copy=False` the state is written in place, so it must not change until the checkpoint is complete. Raises
        NotSaved on all ranks if memory, the folder or the disk fails.
        """
        self.number = next(_NUMBERS)
        self.step = progress.step
        self.path = target.output_dir / finished_name(progress.step)
        self._folder = target.output_dir / partial_name(progress.step)
        self._first = state.groups.rank == 0
        self._writer = writer
        self._one_host = state.one_host
        self._plans: list[PlannedFiles] = []
        # The thread may still delete older checkpoints.
        self._try(writer.wait)
        files, progress = state.stored(progress)
        if target.model_only:
            files = [(stem, held) for stem, held in files if stem == state.stem]
            progress = replace(progress, optimizer_states=[], model_only=True)
        # peft reads adapters from a single file.
        one_file = {state.stem} if state.adapters else set()
        self._plans = [
            plan_tensors(self._folder, stem, held, state.groups, one_file=stem in one_file)
            for stem, held in (self._try(lambda: writer.copied(files)) if copy else files)
        ]
        self._residue: Callable[[], None] = lambda: None
        if state.compression is not None and not target.model_only:
            # Always a copy: it is written in a later phase, when a step may have changed it.
            copied = {name: tensor.to("cpu", copy=True) for name, tensor in state.compression.state().items()}
            description = describe(state.compression, str(state.groups.layout))
            self._residue = partial(write_residue, self._folder, copied, description)
        self._try(lambda: self._open_folder(target))
        self._phases = self._write(target, progress)
        self._running = writer.run(next(self._phases))

    @property
    def is_busy(self) -> bool:
        """Whether this rank's thread is still in its phase."""
        return not self._running.done()

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the thread of this rank."""
        wait([self._running], max(0.0, seconds))

    def advance(self) -> bool:
        """Wait for the running phase on all ranks, and start the next; all ranks call it.

        Returns:
            Whether the checkpoint is complete.

        Raises:
            NotSaved: on all ranks, if the files cannot be written. Older checkpoints stay unchanged.
        """
        result = self._try(self._running.result)
        try:
            self._running = self._writer.run(self._phases.send(result))
        except StopIteration as end:
            # Deleting takes long, so the thread does it while training continues.
            self._writer.run(partial(remove, end.value))
            return True
        return False

    def finish(self) -> Path:
        """Run all remaining phases; return the checkpoint's directory. All ranks call it; raises as `advance`."""
        while not self.advance():
            pass
        return self.path

    def _write(self, target: Target, progress: TrainingProgress) -> Phases:
        """Yield the phases of this rank; all ranks go through the same ones in the same order."""
        yield self._create_files
        with OpenFiles(several_hosts=not self._one_host) as opened:
            yield lambda: self._write_values(opened)
            share = yield lambda: self._hash_and_sync(opened)
        # This collective is safe: the generator runs in the main thread, between two phases, on all ranks alike.
        files = {name: file for part in all_gather_object(share) for name, file in part.items()}

        def end() -> list[Path]:
            finish(target.output_dir, progress, files)
            kept = newest(target.output_dir, target.keep, progress.step)
            if kept and target.best is not None and target.best.is_dir() and target.best not in kept:
                # The best one counts towards the limit, but the newest always stays, to resume from.
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
        # Other hosts hash parts of these files, and see only what the server has.
        if not self._one_host:
            opened.sync()

    def _hash_and_sync(self, opened: OpenFiles) -> Files:
        """Return checksums of this rank's share of the files, while a second thread syncs to disk."""
        # Hashing reads the page cache, so it need not wait for the disk.
        with ThreadPoolExecutor(1) as beside:
            synced = beside.submit(opened.sync)
            share = contents(self._folder, dist.get_rank(), dist.get_world_size())
            synced.result()
        return share

    def _open_folder(self, target: Target) -> None:
        if self._first:
            lock_directory(target.output_dir)
            # A killed run may have left it, or it is a file or link of that name.
            remove([self._folder])
            self._folder.mkdir(parents=True)
            if target.write_others is not None:
                target.write_others(self._folder)

    def _try(self, action: Callable[[], T]) -> T:
        """Run `action` on all ranks; if it fails on any, delete the unfinished folder and raise NotSaved on all."""
        try:
            return all_save(action)
        except NotSaved as error:
            text = str(error)
            if self._first:
                # A lost mount cannot be asked for its free space.
                with suppress(OSError):
                    # Count free inodes before this checkpoint's files are deleted, and free bytes afterwards.
                    full = room(self._folder.parent) if lacks_inodes(self._folder) else ""
                    needed = self._needed_bytes()
                    remove([self._folder])
                    if NO_MEMORY not in text:
                        text += f" ({full or f'it needs {needed:,} bytes, {room(self._folder.parent)}'})"
            raise NotSaved(broadcast_object(text)) from error

    def _needed_bytes(self) -> int:
        """Return the bytes of the planned files plus those of other files written so far."""
        planned = {path for plan in self._plans for path in plan.created}
        others = (path for path in self._folder.rglob("*") if path.is_file() and path not in planned)
        return sum(plan.nbytes for plan in self._plans) + sum(path.stat().st_size for path in others)
