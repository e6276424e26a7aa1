"""Rows of a stream without end: those of files, one file after the other, or of an IterableDataset, pass after pass.

Each row comes with its section, a file or a pass, and its number in it, so that a stream can go on from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch.utils.data import IterableDataset

from harness.data.batches.collate import AnyDataset, MapDataset
from harness.data.batches.same_data import digest
from harness.data.files.extents import whole
from harness.data.files.readers import read_documents_of
from harness.data.files.rows import COLUMNS, document, kind_of_row, plain_row
from harness.data.on_disk.cache import fingerprint
from harness.data.pieces import in_pieces
from harness.errors import UserError
from harness.parallel.generators import own_generators, seed_of
from harness.wording import counted

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Row: TypeAlias = Any
"""A document of a file, or what a program's data set gives."""
_END = object()


class Rows(Protocol):
    """Rows that are read over and over.

    Attributes:
        key: what they are.
    """

    key: str

    @property
    def kind(self) -> str | None:
        """The kind of the rows, as in `files/rows.py`; None for samples as a program made them."""

    def since(self, section: int) -> Iterator[tuple[int, int, Row]]:
        """Give section, number and content of each row from the first one of a section on, without end."""


class FileRows:
    """The documents of files; after the last file comes the first."""

    def __init__(self, files: Sequence[Path], kind: str) -> None:
        self.files, self.kind = list(files), kind
        stamps = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        self.key = fingerprint("stream", kind, *stamps)

    def since(self, section: int) -> Iterator[tuple[int, int, Row]]:
        """Give the rows of all files; a section is a file."""
        count = len(self.files)
        for number in itertools.chain(range(section, count), itertools.cycle(range(count))):
            path = self.files[number]
            try:
                for row, found in enumerate(read_documents_of(whole(path), self.kind)):
                    yield number, row, found
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror or error}") from error


class IterableRows:
    """The rows of an IterableDataset; its `set_epoch`, if there is one, gets the number of each pass.

    What it draws from the global generators depends on pass and row alone, so every rank reads the same.

    Args:
        dataset: iterated anew for each pass.
        name: for messages.
        as_they_are: leave rows of text and of conversations as they are.
    """

    def __init__(self, dataset: Iterable[Row], name: str, *, as_they_are: bool) -> None:
        self._dataset, self._name = dataset, name
        first = next(self._pass(0), None)
        if first is None:
            raise UserError(f"{name} is empty: it must give at least one sample")
        is_document = isinstance(first, Mapping) and any(set(need) <= set(first) for need in COLUMNS.values())
        self.kind: str | None = None
        if is_document and not as_they_are and "input_ids" not in first:
            self.kind = kind_of_row(first, f"{name}, row 1")
        self.key = fingerprint("iterable", type(dataset).__name__, digest(first))

    def since(self, section: int) -> Iterator[tuple[int, int, Row]]:
        """Give the rows of all passes; a section is a pass."""
        for number in itertools.count(section):
            row = -1
            for row, found in enumerate(self._documents(number)):
                yield number, row, found
            if row < 0:
                raise UserError(
                    f"{self._name} gives no sample in pass {number + 1}: its __iter__ must begin anew each time"
                )

    def _documents(self, number: int) -> Iterator[Row]:
        """Give the rows of a pass; a text in pieces, a conversation with its place."""
        for count, row in enumerate(self._pass(number), start=1):
            place = f"{self._name}, row {count}"
            if self.kind is None:
                yield row
            elif isinstance(row, Mapping):
                yield from in_pieces(document(plain_row(row), self.kind, place))
            else:
                raise UserError(f"{place} is {type(row).__name__}, unlike earlier rows: give dicts alone")

    def _pass(self, number: int) -> Iterator[Row]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(number)
        with own_generators(seed_of("pass", number)):
            items = iter(self._dataset)
        for row in itertools.count():
            with own_generators(seed_of("row", number, row)):
                found = next(items, _END)
            if found is _END:
                return
            yield found


def is_iterable(dataset: object) -> TypeIs[IterableDataset[Row]]:
    """Whether this is an IterableDataset, of torch or of the package `datasets`."""
    return isinstance(dataset, IterableDataset)


def read_all(dataset: AnyDataset, name: str, most: int = 1 << 20) -> MapDataset:
    """Return the samples of an IterableDataset as a list, any other data set as it is.

    UserError for one of more than `most` samples, which may have no end.
    """
    if not is_iterable(dataset):
        return dataset
    with own_generators(seed_of("pass", 0)):
        samples = list(itertools.islice(dataset, most + 1))
    if len(samples) > most:
        raise UserError(
            f"{name}: {type(dataset).__name__} gives more than {counted(most, 'sample')}, too many to be held "
            "for an evaluation: give a part of it, such as dataset.take(1000)"
        )
    return samples
