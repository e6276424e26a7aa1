"""Read rows without end: of files, one after the other, or of an IterableDataset, pass after pass.

Each row comes with its section (the file or the pass) and its number there, so that a stream can resume at it.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from harness.batches.same_data import digest
from harness.config.values.json_object import JsonObject
from harness.data.files.formats import format_of
from harness.data.files.pieces import in_pieces
from harness.data.files.rows import COLUMNS, document, kind_of_row, plain_row
from harness.data.on_disk.cache import fingerprint
from harness.errors import UserError
from harness.parallel.generators import own_generators, seed_of

Row: TypeAlias = Any
"""A document of a file, or an item of a user's data set."""
_END = object()
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # number and bytes of the stretches of a file that are hashed to recognise it


Mark = JsonObject
"""A point of a section at which reading can start: the number of its `row`, and how to get there."""
_MARKS = 64  # marks kept: a stream reads a little ahead, and a checkpoint needs marks before the stream's position
_ROWS_PER_STATE = 256  # rows between two calls of `state_dict`, which may be slow


class Rows(ABC):
    """An endless sequence of rows.

    Attributes:
        key: a fingerprint of the data.
        kind: the kind of its rows, as in `files/rows.py`; None if they are finished samples.
        say: prints a line of progress while rows are skipped.
    """

    key: str
    kind: str | None
    say: Callable[[str], None]

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._marks: deque[tuple[int, Mark]] = deque(maxlen=_MARKS)

    @abstractmethod
    def since(self, section: int, mark: Mark) -> Iterator[tuple[int, int, Row]]:
        """Yield (section, number, row) from a mark of a section on, without end; {} is the section's first row."""

    def mark(self, section: int, row: int) -> Mark:
        """Return the latest mark before `row`; {} if there is none. Text needs the row before as its context."""
        found = [mark for number, mark in self._marks if number == section and mark["row"] < row]
        return max(found, key=lambda mark: mark["row"], default={})

    def _note(self, section: int, mark: Mark) -> None:
        self._marks.append((section, mark))


class FileRows(Rows):
    """The documents of files; after the last file the first one follows.

    Files are recognised by size and samples of their content, not by path or time, so they may be moved.
    """

    kind: str

    def __init__(self, files: Sequence[Path], kind: str, say: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(say)
        self.files = list(files)
        self.kind = kind
        self.key = fingerprint("stream", kind, *map(_sampled, files))

    def since(self, section: int, mark: Mark) -> Iterator[tuple[int, int, Row]]:
        """Yield the rows of all files; a section is a file. UserError if one cannot be read."""
        count = len(self.files)
        mark = mark if section < count else {}
        for number in itertools.chain(range(section % count, count), itertools.cycle(range(count))):
            path, row = self.files[number], mark.get("row", 0)
            form = format_of(path)
            try:
                for extent in form.in_order(path, mark.get("start", 0), mark.get("before", 0)):
                    self._note(number, {"row": row, "start": extent.start, "before": extent.before})
                    for found in form.documents(extent, self.kind):
                        yield number, row, found
                        row += 1
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror or error}") from error
            mark = {}


class IterableRows(Rows):
    """The rows of an IterableDataset; its `set_epoch`, if there is one, is called with the number of each pass.

    The global generators are seeded by pass and row, so every rank reads the same. A data set with `state_dict` and
    `load_state_dict` resumes at a row; for others the earlier rows are read and skipped.

    Args:
        dataset: iterated anew for each pass.
        name: the argument's name, for messages.
        as_they_are: take also rows of text and conversations as finished samples.
    """

    def __init__(
        self, dataset: Iterable[Row], name: str, *, as_they_are: bool, say: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(say)
        self._dataset: Any = dataset
        self._name = name
        self._fresh: JsonObject | None = _state_of(dataset)
        first = next(self._pass(0), None)
        if first is None:
            raise UserError(f"{name} is empty: it must give at least one sample")
        is_document = isinstance(first, Mapping) and any(set(need) <= set(first) for need in COLUMNS.values())
        self.kind = None
        if is_document and not as_they_are and "input_ids" not in first:
            self.kind = kind_of_row(first, f"{name}, row 1")
        self.key = fingerprint("iterable", type(dataset).__name__, digest(first))

    def since(self, section: int, mark: Mark) -> Iterator[tuple[int, int, Row]]:
        """Yield the rows of all passes; a section is a pass. UserError if a pass is empty."""
        for number in itertools.count(section):
            row, item = mark.get("row", 0), mark.get("item", 0)
            for found in self._pass(number, mark):
                item += 1
                for each in self._documents(found, item):
                    yield number, row, each
                    row += 1
                if item % _ROWS_PER_STATE == 0 and (state := self._state()) is not None:
                    self._note(number, {"row": row, "item": item, "state": state})
            if item == 0:
                raise UserError(
                    f"{self._name} gives no sample in pass {number + 1}: its __iter__ must begin anew each time"
                )
            mark = {}

    def _documents(self, row: Row, count: int) -> Iterator[Row]:
        """Yield the documents of row number `count` (from 1): a text in pieces, a conversation with its location."""
        location = f"{self._name}, row {count}"
        if self.kind is None:
            yield row
        elif isinstance(row, Mapping):
            yield from in_pieces(document(plain_row(row), self.kind, location))
        else:
            raise UserError(f"{location} is {type(row).__name__}, unlike earlier rows: give dicts alone")

    def _state(self) -> JsonObject | None:
        return None if self._fresh is None else _state_of(self._dataset)

    def _pass(self, number: int, mark: Mark | None = None) -> Iterator[Row]:
        """Yield the rows of a pass, from a mark on if one is given."""
        mark = mark or {}
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(number)
        with own_generators(seed_of("pass", number)):
            if self._fresh is not None:
                # A new pass begins from the state before the first one; copied, as the data set may change the dict.
                self._dataset.load_state_dict(copy.deepcopy(mark.get("state", self._fresh)))
            items = iter(self._dataset)
        for row in itertools.count(mark.get("item", 0)):
            with own_generators(seed_of("row", number, row)):
                found = next(items, _END)
            if found is _END:
                return
            yield found


def _state_of(dataset: object) -> JsonObject | None:
    """Return the state of a data set; None unless it can be saved as JSON and leads back to the same row."""
    if not (callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))):
        return None
    held: list[object] = [getattr(dataset, "_ex_iterable", None)]
    while held:  # `datasets` does not save the content of a shuffle buffer, so such a state would lose rows
        one = held.pop()
        if type(one).__name__ == "BufferShuffledExamplesIterable":
            return None
        held += [found for name in ("ex_iterable", "ex_iterables") for found in _listed(getattr(one, name, None))]
    try:
        state = dataset.state_dict()  # type: ignore[attr-defined]  # its presence was checked above
        written = json.loads(json.dumps(state))
        return written if isinstance(written, dict) and bool(written == state) else None
    except Exception:  # user code may raise anything; rows are skipped one by one instead
        return None


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [] if value is None else [value]


def _sampled(file: Path) -> str:
    """Return a digest of a file's size and of 16 evenly spread stretches."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        found = hashlib.sha256(str(size).encode())
        for number in range(_SAMPLES):
            stream.seek(max(size - _SAMPLE_BYTES, 0) * number // (_SAMPLES - 1))
            found.update(stream.read(_SAMPLE_BYTES))
    return found.hexdigest()
