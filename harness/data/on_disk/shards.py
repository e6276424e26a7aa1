"""Prepared data on disk, in shards: made by several processes, each kept as soon as it is done.

A shard is a folder that gets its name only when it is complete, so an interrupted run goes on with the shards that are
missing. Size, time and digest of each file are noted in the folder; a shard that was cut or changed is made again.
What a shard holds depends on its part of the data alone, never on who makes it or when. Processes of several hosts and
containers that share the disk may make the same shard: each writes its own copy, and the first to finish gives it the
name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from contextvars import ContextVar
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from harness.data.on_disk.progress import Progress
from harness.errors import UserError
from harness.topology.env import use_one_core_for_tokenizers

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

    from datasets import Dataset

Number = TypeVar("Number", bound=np.generic)


def mapped(
    path: Path, dtype: type[Number] | np.dtype[Number], offset: int = 0, count: int | None = None
) -> npt.NDArray[Number]:
    """Map `count` numbers of a file from the byte `offset` on, by default all; the array cannot be written to.

    numpy's own mapping keeps a file descriptor for each file, and a process may often have no more than 1,024.
    """
    import pyarrow as pa

    size = path.stat().st_size
    whole = np.dtype(dtype)
    if count is None:
        count = (size - offset) // whole.itemsize
    if not count:
        return np.empty(0, whole)
    with pa.memory_map(str(path)) as file:
        return np.frombuffer(file.read_buffer(), whole, count, offset)


NOTE = "whole.json"
"""In each folder: size, time of the last change and digest of every other file."""

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def is_whole(folder: Path) -> bool:
    """Whether a folder holds what was written into it.

    A file that has the size and the time of its last change that were noted is not read; any other is.
    """
    try:
        if not (folder / NOTE).is_file():  # a pipe would be waited for
            return False
        noted = json.loads((folder / NOTE).read_bytes())
        touched = {name for name, was in noted.items() if _stamp(folder / name) != was["stamp"]}
        if any(_digest(folder / name) != noted[name]["digest"] for name in touched):
            return False
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
    if touched:  # a copy, for instance: the next start need not read it again
        with suppress(OSError):
            _note(folder, {name: was["digest"] for name, was in noted.items()})
    return bool(noted)


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder, which gets its name when all of it is on disk, unless another process was first."""
    made = _beside(folder)
    made.mkdir(parents=True)
    try:
        write(made)
        for file in made.iterdir():
            _flush(file)
        _note(made, {file.name: _digest(file) for file in made.iterdir()})
        _flush(made)
        _take_name(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _take_name(made: Path, folder: Path) -> None:
    while not is_whole(folder):
        try:
            made.rename(folder)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            damaged = _beside(folder)
            with suppress(FileNotFoundError):  # another process has moved it out of the way
                folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            _flush(folder.parent)
            return


def _beside(folder: Path) -> Path:
    """Return a name that no other process takes: processes of two containers may have the same number."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(8)}")


def _note(folder: Path, digests: dict[str, str]) -> None:
    """Write down what is in a folder."""
    noted = {name: {"stamp": _stamp(folder / name), "digest": digest} for name, digest in digests.items()}
    unfinished = folder / f"{NOTE}.{secrets.token_hex(8)}"
    try:
        unfinished.write_text(json.dumps(noted), encoding="utf-8")
        _flush(unfinished)
        unfinished.replace(folder / NOTE)
    finally:
        unfinished.unlink(missing_ok=True)


def _stamp(file: Path) -> list[int]:
    """Return size and time of the last change."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Have the disk keep a file or folder; OSError if it cannot, but not where it has no such command."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


Part = TypeVar("Part")

SHARD_BYTES = 16 << 20  # of text in a shard: seconds of work, lost if it is interrupted
MOST_SHARDS = 1024  # beyond, shards grow
_BYTES_AT_ONCE = 1 << 20  # of text that a process encodes at once: a tokenizer takes some 50 times as much
_ROWS_AT_ONCE = 1024
_POLL_S = 0.5

_MAKE: ContextVar[Callable[[int], None]] = ContextVar("make")
"""In a worker: makes the shard of a number. It comes with the fork, not through a pickle."""
_PART: ContextVar[_Part | None] = ContextVar("part", default=None)
"""The part that this process works on."""


def shard_bytes(total: int) -> int:
    """Return how many bytes of text to put into a shard, of `total`."""
    return max(SHARD_BYTES, -(-total // MOST_SHARDS))


def rows_of_shards(lengths: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
    """Return the first and the last row + 1 of each shard: a function of the rows' bytes alone."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    size = shard_bytes(total)
    cuts = np.searchsorted(ends, np.arange(size, total, size), side="left") + 1
    return list(pairwise(sorted({0, *cuts.tolist(), len(ends)})))


def batches(lengths: npt.NDArray[np.integer], first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Give runs of the rows `first` to `stop` - 1, of about as many bytes as a process encodes at once."""
    part, total = _PART.get(), max(int(lengths[first:stop].sum(dtype=np.int64)), 1)
    while first < stop:
        ends = np.cumsum(lengths[first : min(first + _ROWS_AT_ONCE, stop)], dtype=np.int64)
        rows = max(int(np.searchsorted(ends, _BYTES_AT_ONCE, side="right")), 1)
        yield first, first + rows
        first += rows
        if part is not None:
            part.advance(int(ends[rows - 1]) / total)


def bytes_of_rows(documents: Dataset, column: str) -> npt.NDArray[np.integer]:
    """Return the bytes of each row's text in `column`, from Arrow's offsets: the text is not read."""
    import pyarrow.compute as pc

    chunks = documents.data.column(column).chunks
    of_chunks = [pc.binary_length(chunk).to_numpy(zero_copy_only=False).astype(np.uint32) for chunk in chunks]
    lengths = np.concatenate([np.empty(0, np.uint32), *of_chunks])
    indices = documents._indices  # noqa: SLF001  # datasets has no public name for which rows are left, in which order
    if indices is not None:
        lengths = lengths[indices.column(0).to_numpy()]
    return lengths


def make_shards(
    folder: Path,
    parts: Sequence[Part],
    write: Callable[[Path, Part], None],
    *,
    doing: str,
    say: Callable[[str], None] = lambda _: None,
    workers: int | None = None,
) -> list[Path]:
    """Make the shards of which `folder` holds no whole one; return the folders of all `parts`, in order.

    Args:
        write: writes the files of a part into a folder.
        doing: what is done to the parts, for the user: "tokenising".
        say: called with a line of progress now and then.
        workers: processes; by default as many as this process may use cores.

    Raises:
        UserError: a process was killed.
        Exception: what `write` raises; of several the one of the first part.
    """
    folders = [folder / f"{index:05d}-of-{len(parts):05d}" for index in range(len(parts))]
    missing = [index for index, path in enumerate(folders) if not is_whole(path)]
    if missing and len(missing) < len(parts):
        say(f"{doing}: {len(parts) - len(missing)} of {len(parts)} shards were made before")
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    progress = Progress(len(missing), doing, say)
    done: Synchronized[float] = get_context("fork").Value("d", 0.0)

    def make(index: int) -> None:
        part = _Part(done, progress.show if workers <= 1 else _nothing)
        token = _PART.set(part)
        try:
            write_whole(folders[index], lambda folder: write(folder, parts[index]))
        finally:
            _PART.reset(token)
        part.finish()

    try:
        if workers <= 1:
            for index in missing:
                make(index)
        else:
            _in_processes(workers, make, missing, doing, lambda: progress.show(done.value))
    finally:
        progress.close()
    return folders


def _in_processes(
    workers: int, make: Callable[[int], None], missing: Sequence[int], doing: str, show: Callable[[], None]
) -> None:
    """Call `make` on these numbers in processes; `show` is called now and then.

    They are forked, so that a user's own tokenizer and script need neither be pickled nor imported once more.
    """
    with ProcessPoolExecutor(workers, get_context("fork"), _begin_worker, (make, os.getpid())) as pool:
        try:
            for future in [pool.submit(_make_in_worker, index) for index in missing]:
                while not wait([future], timeout=_POLL_S).done:
                    show()
                future.result()
            show()
        except BrokenProcessPool as error:
            raise UserError(
                f"a process was killed while {doing}, perhaps for want of memory: start again, and what is done is kept"
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _nothing(_done: float) -> None:
    """Show nothing: the process that waits does."""


class _Part:
    """How much of one part is done, as a fraction, added to what is done of all."""

    def __init__(self, of_all: Synchronized[float], shown: Callable[[float], None]) -> None:
        self._of_all, self._shown = of_all, shown
        self._done = 0.0

    def advance(self, fraction: float) -> None:
        """Count this fraction of the part."""
        self._done += fraction
        with self._of_all.get_lock():
            self._of_all.value += fraction
        self._shown(self._of_all.value)

    def finish(self) -> None:
        """Count what is left of the part."""
        self.advance(1.0 - self._done)


def _begin_worker(make: Callable[[int], None], parent: int) -> None:
    """Let a worker end when the process that wants its work is gone. Its tokenizer uses one core: it has siblings."""
    _MAKE.set(make)
    use_one_core_for_tokenizers()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _make_in_worker(index: int) -> None:
    _MAKE.get()(index)
