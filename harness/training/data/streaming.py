"""Samples of files that are read and tokenised while the run trains, in the order of the files, over and over.

The k-th sample is a function of the files alone: every rank that reads data passes over all of them and lays out its
own. Where a source stands, a file, a row in it and the ids left over, is kept in the checkpoint, so that a resumed run
passes over rows without tokenising them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.training.batches.collate import IGNORED
from harness.training.batches.order import Indices, OwnOrder
from harness.training.data.blocks import require_block_size
from harness.training.data.chat import ConversationEncoder
from harness.training.data.files.extents import Extent
from harness.training.data.files.readers import read_documents_of
from harness.training.data.files.rows import TEXT
from harness.training.data.files.sources import find_files
from harness.training.data.mixing.shares import Shares
from harness.training.data.on_disk.cache import fingerprint, identity
from harness.training.data.pieces import PieceEncoder
from harness.training.data.tokenizer import Tokenizer

ENDLESS = 1 << 60
"""The length of a stream, which has none."""

Sample = dict[str, Tensor]
Ids = npt.NDArray[np.int64]
_MOST_UNUSED = 10_000


@dataclass(frozen=True)
class _Place:
    """Where a stream stands: `sample` is the next one, made of `rest` and of the rows from `row` of `file` on."""

    sample: int = 0
    file: int = 0
    row: int = 0
    rest: Ids = field(default_factory=lambda: np.empty(0, np.int64))


class StreamedSource:
    """The samples of one source, to be read in order: text in blocks, or conversations padded on the right.

    Attributes:
        key: what the samples are made of.
    """

    def __init__(self, files: Sequence[Path], kind: str, tokenizer: Tokenizer, block_size: int) -> None:
        self.files, self.kind, self.block_size = list(files), kind, block_size
        self._pieces, self._chat = PieceEncoder(tokenizer), ConversationEncoder(tokenizer)
        stamps = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        self.key = fingerprint("stream", kind, block_size, identity(tokenizer), *stamps)
        self.seek({})

    def __getitem__(self, index: int) -> Sample:
        if index < self._place.sample:  # as after a rollback
            self._start(self._origin)
        for _ in range(index - self._place.sample):
            next(self._coming)
        return next(self._coming)

    def seek(self, position: JsonObject) -> None:
        """Go on from a position that was kept; from the beginning where it is empty."""
        rest = np.array(position.get("rest", ()), dtype=np.int64)
        self._origin = _Place(**{**position, "rest": rest})
        self._start(self._origin)

    def position(self, sample: int) -> JsonObject:
        """Return where the stream stands before this sample, which is not behind what was read."""
        for _ in range(sample - self._place.sample):
            next(self._coming)
        place = self._place
        return {"sample": place.sample, "file": place.file, "row": place.row, "rest": place.rest.tolist()}

    def _start(self, origin: _Place) -> None:
        self._place = origin
        self._coming = self._blocks(origin) if self.kind == TEXT else self._conversations(origin)

    def _rows(self, origin: _Place) -> Iterator[tuple[int, int, dict[str, str | int]]]:
        """Give all rows from a file's first on, each with its file and number; after the last file comes the first."""
        count = len(self.files)
        for file in itertools.chain(range(origin.file, count), itertools.cycle(range(count))):
            path = self.files[file]
            try:
                for row, document in enumerate(read_documents_of(Extent(str(path), 0, path.stat().st_size), self.kind)):
                    yield file, row, document
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror or error}") from error

    def _pairs(self, origin: _Place) -> Iterator[tuple[str, dict[str, str | int], tuple[int, int], str | None]]:
        """Give each row from a place on: the text before it, the row, the place of the next, the text that continues
        it."""
        before, reached = "", False
        for (file, row, document), (next_file, next_row, after) in itertools.pairwise(self._rows(origin)):
            reached = reached or (file, row) == (origin.file, origin.row)
            if reached:
                continued = str(after["text"]) if after.get("part", 0) != 0 else None
                yield before, document, (next_file, next_row), continued
            before = str(document.get("text", ""))

    def _blocks(self, origin: _Place) -> Iterator[Sample]:
        sample, rest = origin.sample, origin.rest
        for before, document, following, continued in self._pairs(origin):
            part = int(document["part"])
            (ids,) = self._pieces([str(document["text"])], [part], before if part else "", continued)
            rest = np.concatenate([rest, ids.astype(np.int64)])
            while len(rest) >= self.block_size:
                block, rest = rest[: self.block_size], rest[self.block_size :]
                sample += 1
                self._place = _Place(sample, *following, rest)
                yield {"input_ids": torch.from_numpy(block)}

    def _conversations(self, origin: _Place) -> Iterator[Sample]:
        sample, unused = origin.sample, 0
        for _, document, following, _ in self._pairs(origin):
            encoded = self._chat(str(document["conversation"]), str(document["place"]))
            length = min(len(encoded.ids), self.block_size)
            if not encoded.answers[1:length].any():
                unused += 1
                if unused > _MOST_UNUSED:
                    raise UserError(
                        f"{document['place']}: {unused} conversations in a row have no answer within the first "
                        f"{self.block_size} tokens: raise --block_size"
                    )
                continue
            unused, sample = 0, sample + 1
            ids, labels, mask = np.full((3, self.block_size), [[self._chat.end], [IGNORED], [0]], dtype=np.int64)
            ids[:length], mask[:length] = encoded.ids[:length], 1
            labels[:length] = np.where(encoded.answers[:length], encoded.ids[:length], IGNORED)
            self._place = _Place(sample, *following)
            columns = {"input_ids": ids, "labels": labels, "attention_mask": mask}
            yield {name: torch.from_numpy(values) for name, values in columns.items()}


def streamed(paths: Sequence[str], kind: str, tokenizer: Tokenizer, block_size: int) -> StreamedSource:
    """Return the samples of the files that these paths name."""
    require_block_size(block_size)
    return StreamedSource([file for path in paths for file in find_files(path)], kind, tokenizer, block_size)


class Streamed(OwnOrder):
    """One or several streamed sources as one data set without end, by shares where there are several.

    It is read in the order of its samples, and has a position that a checkpoint keeps.
    """

    endless = True

    def __init__(self, sources: Sequence[StreamedSource], weights: Sequence[float] = ()) -> None:
        self.sources = list(sources)
        self._shares = Shares(weights or [1.0])
        self.key = fingerprint(*(source.key for source in sources), *self._shares.shares)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Sample:
        (number,), (place,) = self._shares.places(index, 1)
        sample: Sample = self.sources[number][int(place)]
        if len(self.sources) == 1:
            return sample
        ids = sample["input_ids"]
        return {"labels": ids, "attention_mask": torch.ones_like(ids), **sample}

    def order(self, consumed: int, count: int, seed: int) -> Indices:  # noqa: ARG002  # of a data set with an order
        """Return the `count` samples that follow the first `consumed`: a stream has no other order."""
        return np.arange(consumed, consumed + count)

    def position(self, consumed: int) -> JsonObject:
        """Return where each source stands when so many samples were consumed."""
        before = self._shares.before(consumed)
        return {"sources": [source.position(count) for source, count in zip(self.sources, before, strict=True)]}

    def seek(self, position: JsonObject) -> None:
        """Go on from a position that was kept."""
        for source, place in zip(self.sources, position["sources"], strict=True):
            source.seek(place)
