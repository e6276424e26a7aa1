"""Read documents without end: of files, one after the other, or of an IterableDataset, pass after pass."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness.batches.stream import fingerprint
from harness.data.formats import Extent, format_of
from harness.data.rows.kinds import COLUMNS, document, kind_of_row, plain_row
from harness.data.rows.pieces import in_pieces
from harness.data.streaming.iterable import IterableRows, Mark, Row, Rows
from harness.errors import UserError

_SAMPLES, _SAMPLE_BYTES = 16, 4096  # number and bytes of the stretches of a file that are hashed to recognise it


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
            path = self.files[number]
            row = mark.get("row", 0)
            form = format_of(path)
            try:
                for extent in form.in_order(path, mark.get("start", 0), mark.get("before", 0)):
                    self._note(number, {"row": row, "start": extent.start, "before": extent.before})
                    for found in self._rows_of(extent):
                        yield number, row, found
                        row += 1
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror or error}") from error
            mark = {}

    def _rows_of(self, extent: Extent) -> Iterator[Row]:
        """Yield the documents of an extent of a file."""
        return format_of(Path(extent.file)).documents(extent, self.kind)


class DocumentRows(IterableRows):
    """The documents of an IterableDataset of text or conversations; long text in pieces.

    Attributes:
        kind: the kind of its rows, as in `rows/kinds.py`; None if they are finished samples.
    """

    def __init__(self, dataset: Iterable[Row], name: str, *, say: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(dataset, name, say=say)
        first = self.first
        is_document = isinstance(first, Mapping) and any(set(need) <= set(first) for need in COLUMNS.values())
        self.kind = kind_of_row(first, f"{name}, row 1") if is_document and "input_ids" not in first else None

    def samples_of(self, row: Row, count: int) -> Iterator[Row]:
        """Yield the documents of row number `count` (from 1): a text in pieces, a conversation with its location."""
        location = f"{self.name}, row {count}"
        if self.kind is None:
            yield row
        elif isinstance(row, Mapping):
            yield from in_pieces(document(plain_row(row), self.kind, location))
        else:
            raise UserError(f"{location} is {type(row).__name__}, unlike earlier rows: give dicts alone")


def _sampled(file: Path) -> str:
    """Return a digest of a file's size and of 16 evenly spread stretches."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        found = hashlib.sha256(str(size).encode())
        for number in range(_SAMPLES):
            stream.seek(max(size - _SAMPLE_BYTES, 0) * number // (_SAMPLES - 1))
            found.update(stream.read(_SAMPLE_BYTES))
    return found.hexdigest()
