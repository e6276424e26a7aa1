"""Text -> token ids on disk, in shards: made by several processes, each kept as soon as it is done.

A shard is a run of rows of documents. Its folder holds `ids`, all ids one after the other, and `starts.npy`, the places
among them where documents begin. It gets its name only when it is whole, so that a run that was interrupted goes on
with the shards that are missing. Each process takes memory for some MB of text, however long a document is.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.config.errors import UserError
from harness.topology.env import use_one_core_for_tokenizers
from harness.training.data.pieces import PieceEncoder, parts_of

if TYPE_CHECKING:
    from datasets import Dataset

SHARD_BYTES = 16 << 20  # of text in a shard: seconds of work, lost if it is interrupted
MOST_SHARDS = 1024  # beyond, shards grow
_BYTES_AT_ONCE = 1 << 20  # of text that a process encodes at once: a tokenizer takes some 50 times as much
_ROWS_AT_ONCE = 1024
_REPORT_EVERY_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents that become shards.

    Attributes:
        documents: with columns `text` and perhaps `part`.
        encoder: makes ids of their rows.
        dtype: of the ids on disk.
        lengths: bytes of each row's text.
        parts: which part of its document each row is.
    """

    documents: Dataset
    encoder: PieceEncoder
    dtype: np.dtype[np.integer]
    lengths: npt.NDArray[np.integer]
    parts: npt.NDArray[np.integer]

    @classmethod
    def of(cls, documents: Dataset, encoder: PieceEncoder, dtype: np.dtype[np.integer]) -> Corpus:
        """Measure the rows; their text is not read."""
        lengths, parts = _text_bytes(documents), parts_of(documents)
        return cls(documents=documents, encoder=encoder, dtype=dtype, lengths=lengths, parts=parts)

    def shards(self) -> list[tuple[int, int]]:
        """Return the first and the last row + 1 of each shard: a function of the texts alone."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        size = max(SHARD_BYTES, -(-total // MOST_SHARDS))
        cuts = np.searchsorted(ends, np.arange(size, total, size), side="left") + 1
        return list(pairwise(sorted({0, *cuts.tolist(), len(ends)})))

    def write(self, folder: Path, first: int, stop: int) -> None:
        """Encode rows `first` to `stop` - 1 into `folder`, which appears when it is whole."""
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        unfinished.mkdir(parents=True, exist_ok=True)
        starts: list[int] = []
        count = 0
        try:
            with (unfinished / "ids").open("wb") as file:
                for ids, part in zip(self._encoded(first, stop), self.parts[first:stop], strict=True):
                    if part == 0:
                        starts.append(count)
                    ids.astype(self.dtype).tofile(file)
                    count += len(ids)
            np.save(unfinished / "starts.npy", np.asarray(starts, dtype=np.int64))
            if not folder.is_dir():  # else another process has made it
                unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _encoded(self, first: int, stop: int) -> Iterator[npt.NDArray[np.integer]]:
        for start, end in self._batches(first, stop):
            rows = self.documents[start:end]["text"]
            before = self.documents[start - 1]["text"] if self.parts[start] > 0 else ""
            continued = end < len(self.parts) and self.parts[end] > 0
            after = self.documents[end]["text"] if continued else None
            yield from self.encoder(rows, self.parts[start:end].tolist(), before, after)

    def _batches(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Runs of rows of about `_BYTES_AT_ONCE`."""
        while first < stop:
            ends = np.cumsum(self.lengths[first : min(first + _ROWS_AT_ONCE, stop)], dtype=np.int64)
            rows = max(int(np.searchsorted(ends, _BYTES_AT_ONCE, side="right")), 1)
            yield first, first + rows
            first += rows


def make_shards(corpus: Corpus, folder: Path, say: Callable[[str], None], workers: int | None = None) -> list[Path]:
    """Make the shards of a corpus that `folder` does not hold yet; return the folders of all, in order.

    Args:
        say: called with a line of progress now and then.
        workers: processes; by default as many as this process may use cores.

    Raises:
        UserError: a process was killed.
        OSError: the shards cannot be written.
    """
    shards = corpus.shards()
    folders = [folder / f"{index:05d}-of-{len(shards):05d}" for index in range(len(shards))]
    missing = [(path, *rows) for path, rows in zip(folders, shards, strict=True) if not path.is_dir()]
    if missing and len(missing) < len(shards):
        say(f"tokenising: {len(shards) - len(missing)} of {len(shards)} shards were made before")
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    progress = _Progress(len(missing), say)
    if workers <= 1:
        for shard in missing:
            corpus.write(*shard)
            progress.one_more()
        return folders
    # Forked, so that a user's own tokenizer and script need neither be pickled nor imported once more.
    with ProcessPoolExecutor(workers, get_context("fork"), _end_with_parent, (os.getpid(),)) as pool:
        try:
            for done in as_completed([pool.submit(corpus.write, *shard) for shard in missing]):
                done.result()
                progress.one_more()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that tokenises was killed, perhaps for want of memory: start again, and what is done is kept"
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return folders


class TokenIds:
    """All ids of a corpus, one after the other, mapped from its shards."""

    def __init__(self, folders: list[Path], dtype: np.dtype[np.integer]) -> None:
        sizes = [(folder / "ids").stat().st_size // dtype.itemsize for folder in folders]
        self._folders = [folder for folder, size in zip(folders, sizes, strict=True) if size]
        self._ids = [np.memmap(folder / "ids", dtype=dtype, mode="r") for folder in self._folders]
        self._starts = [np.load(folder / "starts.npy", mmap_mode="r") for folder in self._folders]
        self._ends = np.cumsum([size for size in sizes if size], dtype=np.int64).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return ids `start` to `stop` - 1."""
        parts = [self._ids[shard][first:last] for shard, first, last in self._overlaps(start, stop)]
        return np.concatenate(parts, dtype=np.int64, casting="safe")

    def starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return which of these ids begin a document, counted from `start`."""
        found = [np.empty(0, dtype=np.int64)]
        for shard, first, last in self._overlaps(start, stop):
            starts = self._starts[shard]
            offset = self._ends[shard] - len(self._ids[shard]) - start
            found.append(starts[np.searchsorted(starts, first) : np.searchsorted(starts, last)] + offset)
        return np.concatenate(found)

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The shards that hold ids `start` to `stop` - 1, each with the first and the last + 1 of its own."""
        shard = bisect_right(self._ends, start)
        while start < stop:
            begins = self._ends[shard] - len(self._ids[shard])
            last = min(stop, self._ends[shard])
            yield shard, start - begins, last - begins
            start, shard = last, shard + 1


class _Progress:
    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self.total, self.say = total, say
        self.done = 0
        self.begun = self.reported = time.monotonic()

    def one_more(self) -> None:
        """Count a shard; say how far it is, if it was not said just now."""
        self.done += 1
        now = time.monotonic()
        if now - self.reported >= _REPORT_EVERY_S and self.done < self.total:
            self.reported = now
            left = (now - self.begun) / self.done * (self.total - self.done)
            self.say(f"tokenising: {self.done} of {self.total} shards, about {max(left / 60, 1):.0f} min left")


def _text_bytes(documents: Dataset) -> npt.NDArray[np.integer]:
    """Bytes of the text of each row, from Arrow's offsets."""
    import pyarrow.compute as pc

    chunks = documents.data.column("text").chunks
    of_chunks = [pc.binary_length(chunk).to_numpy(zero_copy_only=False).astype(np.uint32) for chunk in chunks]
    lengths = np.concatenate([np.empty(0, np.uint32), *of_chunks])
    if documents._indices is not None:
        lengths = lengths[documents._indices.column(0).to_numpy()]
    return lengths


def _end_with_parent(parent: int) -> None:
    """Let a worker end when the process that wants its work is gone. Its tokenizer uses one core: it has siblings."""
    use_one_core_for_tokenizers()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
