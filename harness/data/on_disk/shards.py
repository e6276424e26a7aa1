"""Write prepared data in shards, by several processes; each shard is kept as soon as it is complete.

A shard is a folder that gets its final name only when it is complete, so an interrupted run continues with the missing
shards. `whole.json` in it holds size, times and digest of each file; a truncated or changed shard is written again. The
content of a shard depends on its part of the data alone. Processes of hosts or containers that share a disk may write
the same shard: each writes its own copy, and the first to finish renames its copy.
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
from xxhash import xxh3_128

from harness.atomic import exchange, rename_folder
from harness.config.values.json_file import object_or_empty
from harness.data.on_disk.progress import PreparationProgress
from harness.errors import UserError
from harness.topology.env import use_one_core_for_tokenizers

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

    from datasets import Dataset

Number = TypeVar("Number", bound=np.generic)
Part = TypeVar("Part")

NOTE = "whole.json"
"""File in each shard with size, times and digest of every other file."""
SHARD_BYTES = 16 << 20  # bytes of text in a shard: an interruption loses a few seconds of work
MOST_SHARDS = 1024  # of a larger text, the shards are larger
_BYTES_AT_ONCE = 1 << 20  # bytes of text that a process encodes at once; a tokenizer needs about 50 times the memory
_ROWS_AT_ONCE = 1024
_POLL_S = 0.5
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)

_MAKE: ContextVar[Callable[[int], None]] = ContextVar("make")
"""In a worker: the function that writes shard number i. It is inherited by the fork, so it need not be picklable."""
_ADVANCE: ContextVar[Callable[[float], None]] = ContextVar("advance")
"""While a shard is written: adds a fraction of it to the progress."""


def mapped(
    path: Path, dtype: type[Number] | np.dtype[Number], offset: int = 0, count: int | None = None
) -> npt.NDArray[Number]:
    """Map `count` numbers of a file from byte `offset` on, by default all, as a read-only array [count].

    Unlike numpy.memmap, Arrow closes the file descriptor; a process may often have only 1,024 of them.
    """
    import pyarrow as pa

    dtype = np.dtype(dtype)
    if count is None:
        count = (path.stat().st_size - offset) // dtype.itemsize
    if not count:
        return np.empty(0, dtype)
    with pa.memory_map(str(path)) as file:
        return np.frombuffer(file.read_buffer(), dtype, count, offset)


def is_whole(folder: Path) -> bool:
    """Return whether a folder holds exactly what was written into it.

    A file with the noted size and times is not read; of any other file the digest is compared.
    """
    noted = object_or_empty(folder / NOTE)
    if not all(isinstance(was, dict) for was in noted.values()):
        return False
    try:
        touched = {name for name, was in noted.items() if stamp_of(folder / name) != was.get("stamp")}
        if any(digest_of(folder / name) != noted[name].get("digest") for name in touched):
            return False
    except (OSError, ValueError):  # a name may hold what no file's name can
        return False
    if touched:  # same content, new time, as after a copy: note the time, so that the next start need not read it
        with suppress(OSError):
            _note(folder, {name: was["digest"] for name, was in noted.items()})
    return bool(noted)


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, flush it to disk, and rename it to `folder`, unless another process was first."""
    made = _beside(folder)
    made.mkdir(parents=True)
    try:
        write(made)
        for file in made.iterdir():
            _flush(file)
        _note(made, {file.name: digest_of(file) for file in made.iterdir()})
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
            # Another process may have finished its copy meanwhile, and be reading it. A whole copy must stay. A damaged
            # one is exchanged with ours in one system call, so that the name always exists.
            if is_whole(folder) or exchange(made, folder):
                continue
            damaged = _beside(folder)  # the file system cannot exchange names: move the damaged one away
            with suppress(FileNotFoundError):  # another process did so first
                rename_folder(folder, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            break
    _flush(folder.parent)


def _beside(folder: Path) -> Path:
    """Return a unique name beside `folder`. Process ids are not unique: two containers may have the same."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(8)}")


def _note(folder: Path, digests: dict[str, str]) -> None:
    """Write `whole.json` under another name and rename it, so that a reader never sees half of it."""
    noted = {name: {"stamp": stamp_of(folder / name), "digest": digest} for name, digest in digests.items()}
    unfinished = folder / f"{NOTE}.{secrets.token_hex(8)}"
    try:
        unfinished.write_text(json.dumps(noted), encoding="utf-8")
        _flush(unfinished)
        unfinished.replace(folder / NOTE)
    finally:
        unfinished.unlink(missing_ok=True)


def stamp_of(file: Path) -> list[int]:
    """Return size in bytes and times of modification and change in ns: equal only for a file with the same content.

    A program can set the modification time; the system sets the time of change, at every write and rename.
    """
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def digest_of(file: Path) -> str:
    """Return a hash of a file's content in hex: of several GB a second, so about as fast as a disk reads."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxh3_128).hexdigest()


def _flush(path: Path) -> None:
    """Flush a file or folder to disk. OSError if that fails, except on a file system without fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def shard_bytes(total: int) -> int:
    """Return the size of a shard in bytes of text, for `total` bytes of text."""
    return max(SHARD_BYTES, -(-total // MOST_SHARDS))


def rows_of_shards(lengths: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
    """Return (first row, last row + 1) of each shard; `lengths` are the bytes of each row."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    size = shard_bytes(total)
    cuts = np.searchsorted(ends, np.arange(size, total, size), side="left") + 1
    return list(pairwise(sorted({0, *cuts.tolist(), len(ends)})))


def batches(lengths: npt.NDArray[np.integer], first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of batches of rows `first` to `stop` - 1; a batch has about 1 MiB of text.

    Between batches the progress of the shard is reported.
    """
    advance = _ADVANCE.get(None)
    total = max(int(lengths[first:stop].sum(dtype=np.int64)), 1)
    while first < stop:
        ends = np.cumsum(lengths[first : min(first + _ROWS_AT_ONCE, stop)], dtype=np.int64)
        rows = max(int(np.searchsorted(ends, _BYTES_AT_ONCE, side="right")), 1)
        yield first, first + rows
        first += rows
        if advance is not None:
            advance(int(ends[rows - 1]) / total)


def bytes_of_rows(documents: Dataset, column: str) -> npt.NDArray[np.integer]:
    """Return the bytes of each row's text in `column` [rows], from Arrow's offsets, without reading the text."""
    import pyarrow.compute as pc

    chunks = documents.data.column(column).chunks
    of_chunks = [pc.binary_length(chunk).to_numpy(zero_copy_only=False).astype(np.uint32) for chunk in chunks]
    lengths = np.concatenate([np.empty(0, np.uint32), *of_chunks])
    indices = documents._indices  # noqa: SLF001  # rows and order after select(); datasets has no public name for it
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
    """Write the shards that are missing or damaged in `folder`; return the folders of all `parts`, in order.

    Args:
        write: writes the files of a part into a folder.
        doing: the work in a word, for the user: "tokenising".
        say: prints a line of progress now and then.
        workers: number of processes; by default the number of cores this process may use.

    Raises:
        UserError: a process was killed.
        Exception: what `write` raised for the first part that failed.
    """
    folders = [folder / f"{index:05d}-of-{len(parts):05d}" for index in range(len(parts))]
    missing = [index for index, path in enumerate(folders) if not is_whole(path)]
    if missing and len(missing) < len(parts):
        say(f"{doing}: {len(parts) - len(missing)} of {len(parts)} shards were made before")
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    progress = PreparationProgress(len(missing), doing, say)
    done: Synchronized[float] = get_context("fork").Value("d", 0.0)  # shards done, in memory shared with the workers

    def make(index: int) -> None:
        counted = 0.0

        def advance(fraction: float) -> None:
            nonlocal counted
            counted += fraction
            with done.get_lock():
                done.value += fraction
            if workers <= 1:  # otherwise the parent process shows it while it waits
                progress.show(done.value)

        token = _ADVANCE.set(advance)
        try:
            write_whole(folders[index], lambda folder: write(folder, parts[index]))
        finally:
            _ADVANCE.reset(token)
        advance(1.0 - counted)

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
    """Call `make` on these shard numbers in worker processes, and `show` now and then.

    Workers are forked, not spawned: so a user's tokenizer need not be picklable, and the script is not imported again.
    """
    with ProcessPoolExecutor(workers, get_context("fork"), _begin_worker, (make, os.getpid())) as pool:
        try:
            # Wait in the order of the shards, so that the first part's error is raised if there are several.
            for future in [pool.submit(_make_in_worker, index) for index in missing]:
                while not wait([future], timeout=_POLL_S).done:
                    show()
                future.result()
            show()
        except BrokenProcessPool as error:
            raise UserError(
                f"a process was killed while {doing}, perhaps because memory ran out: start again; finished shards "
                "are kept"
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begin_worker(make: Callable[[int], None], parent: int) -> None:
    """Limit this worker's tokenizer to one core, as each core has a worker; end the worker with its parent."""
    _MAKE.set(make)
    use_one_core_for_tokenizers()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _make_in_worker(index: int) -> None:
    _MAKE.get()(index)
