"""Copy the rows of files, or of a user's data set, to disk as documents: a `datasets.Dataset` mapped from Arrow files.

Several processes write the rows in shards (`on_disk/shards.py`), so an interrupted copy continues with the missing
shards. Why this is not `datasets.load_dataset`: see "Preparing data" in docs/measurements.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from harness.batches.collate import MapDataset
from harness.batches.stream import fingerprint
from harness.data.files.extents import planned
from harness.data.files.sources import find_files, preflight
from harness.data.formats import Extent, format_of
from harness.data.on_disk.cache import (
    cache_error,
    fingerprint_of,
    prepared_folder,
    set_fingerprint,
)
from harness.data.on_disk.shards import digest_of, is_whole, make_shards, shard_bytes, stamp_of, write_whole
from harness.data.rows.kinds import COLUMNS, TEXT, document, kind_of_row, plain_row
from harness.data.rows.pieces import in_pieces, parts_of
from harness.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, Features

Part = TypeVar("Part")

# Parts of the cache keys. Increase one when a code change gives other documents for the same files or rows.
_FORMAT_OF_FILES = 6
_FORMAT_OF_ROWS = 5

_FILE = "rows.arrow"
_CHARACTERS_AT_ONCE = 1 << 20  # characters of text that are collected before they are written
_ROWS_AT_ONCE = 64


def read_documents(
    source: str | os.PathLike[str] | Sequence[str],
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
    workers: int | None = None,
) -> Dataset:
    """Return the documents of a source, or of several sources of one kind in order, mapped from disk.

    Text has the columns `text` and `part`: a long text is split into several rows, numbered from 0. Conversations have
    `conversation` and `place`. The text of a .txt file is its bytes decoded as UTF-8: no newline is added, dropped or
    translated. Only a few rows at a time are in memory. The copy is kept in `cache_dir` (default HF_DATASETS_CACHE) and
    reused while the paths and the content of the files are the same. The content is hashed only if the size, the
    modification time or the change time of a file has changed.

    Raises:
        UserError: as in `preflight`; also for text that is not UTF-8, invalid JSON, or a row of another kind.
    """
    from datasets import Features, Value

    sources = [source] if isinstance(source, str | os.PathLike) else source
    (kind,) = {preflight(source) for source in sources}
    files = [file.absolute() for source in sources for file in find_files(source)]
    text = Value("large_string")
    features = {"text": text, "part": Value("int32")} if kind == TEXT else {"conversation": text, "place": text}

    def read(extents: Sequence[Extent]) -> Iterator[dict[str, str | int]]:
        for extent in extents:
            try:
                yield from format_of(Path(extent.file)).documents(extent, kind)
            except OSError as error:
                raise UserError(f"cannot read {extent.file}: {error.strerror or error}") from error

    try:
        content = content_digest(files, prepared_folder(cache_dir))
        folder = prepared_folder(cache_dir) / fingerprint("sources", _FORMAT_OF_FILES, kind, *files, content)
        return copied(folder, planned(files, folder), read, Features(features), say=say, workers=workers)
    except OSError as error:  # from writing: `read` has turned those from reading into UserErrors
        raise cache_error(error, cache_dir) from error


def content_digest(files: Sequence[Path], prepared: Path) -> str:
    """Return a digest of the content of files, cached in `prepared` under their sizes and times."""
    stamps = [(str(file), stamp_of(file)) for file in files]
    place = prepared / "contents" / fingerprint(*stamps)
    if not is_whole(place):
        digests: list[str] = []
        for file in files:
            try:
                digests.append(digest_of(file))
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror or error}") from error

        def note(folder: Path) -> None:
            (folder / "digest").write_text(fingerprint(*digests), encoding="ascii")

        write_whole(place, note)
    return (place / "digest").read_text(encoding="ascii")


def as_documents(dataset: MapDataset, name: str, say: Callable[[str], None] = lambda _: None) -> Dataset:
    """Convert a user's map-style data set of dicts into documents.

    The documents of a `datasets.Dataset` on disk are written to HF_DATASETS_CACHE. Those of other data sets, and of one
    with a transform (`with_transform`), stay in memory: what a transform gives is known only by reading all of it.

    Raises UserError, naming `name[i]`, for a row that cannot be used.
    """
    from datasets import Dataset, Features, Value

    kind = kind_of_row(dataset[0], f"{name}[0]")
    names = list(next(in_pieces(document(plain_row(dataset[0]), kind, f"{name}[0]"))))
    features = Features({column: Value("int32" if column == "part" else "large_string") for column in names})

    def documents(rows: Iterable[tuple[int, Mapping[str, object]]]) -> Iterator[dict[str, str | int]]:
        for number, row in rows:
            if not isinstance(row, Mapping):
                raise UserError(f"{name}[{number}] is {type(row).__name__}, unlike earlier rows: give dicts alone")
            yield from in_pieces(document(plain_row(row), kind, f"{name}[{number}]"))

    if not (isinstance(dataset, Dataset) and dataset.cache_files and dataset.format["type"] != "custom"):
        made = list(documents((i, dataset[i]) for i in range(len(dataset))))
        table = Dataset.from_list(made, features=features)
        set_fingerprint(table, fingerprint(*(value for row in made for value in row.values())))
        return table

    plain = dataset.with_format(None)
    count = len(dataset)
    total = dataset.data.nbytes
    prepared = prepared_folder(None)
    stored = sorted({Path(each["filename"]) for each in dataset.cache_files})
    in_shard = max(
        count * shard_bytes(total) // max(total, 1), 1
    )  # rows; the same on every host, so shards can be shared
    shards = [range(start, min(start + in_shard, count)) for start in range(0, count, in_shard)]

    def rows_of(shard: range) -> Iterator[tuple[int, dict[str, object]]]:
        for start in range(shard.start, shard.stop, _ROWS_AT_ONCE):
            batch = plain[start : min(start + _ROWS_AT_ONCE, shard.stop)]
            for number, values in enumerate(zip(*batch.values(), strict=True), start):
                yield number, dict(zip(batch, values, strict=True))

    try:  # `datasets` makes its fingerprint of the files' modification times; a select() or shuffle() is in it, too
        content = content_digest(stored, prepared)
        folder = prepared / fingerprint("documents", _FORMAT_OF_ROWS, fingerprint_of(dataset), content, kind, name)
        return copied(folder, shards, lambda shard: documents(rows_of(shard)), features, say=say)
    except OSError as error:
        raise cache_error(error, None) from error


def holds_tokens(dataset: MapDataset | None) -> bool:
    """Return True if a data set needs no tokenising: None, rows with input_ids, pairs, rows without a known column."""
    if dataset is None or not hasattr(dataset, "__getitem__") or not len(dataset):
        return True
    row = dataset[0]
    if not isinstance(row, Mapping) or "input_ids" in row:
        return True
    return not any(set(needed) <= set(row) for needed in COLUMNS.values())


def hold_out(documents: Dataset, part: Fraction = Fraction(1, 20)) -> tuple[Dataset, Dataset]:
    """Split documents into (training, evaluation); the held-out `part` is spread evenly, beginning with the first.

    Raises UserError if there are fewer than two documents.
    """
    number = np.cumsum(parts_of(documents) == 0) - 1  # for each row, the index of its document
    total = int(number[-1]) + 1 if len(number) else 0
    if total < 2:
        raise UserError(f"{total} document cannot be split for evaluation: give a --validation_file")
    part = part.limit_denominator(2**62 // total)  # so that the products below fit into 64 bits
    held_out = number * part.numerator // part.denominator != (number - 1) * part.numerator // part.denominator
    return documents.select(np.flatnonzero(~held_out)), documents.select(np.flatnonzero(held_out))


def copied(
    folder: Path,
    parts: Sequence[Part],
    read: Callable[[Part], Iterable[Mapping[str, object]]],
    features: Features,
    *,
    say: Callable[[str], None] = lambda _: None,
    workers: int | None = None,
) -> Dataset:
    """Write the rows of each part, as `read` yields them, to a shard in `folder`; return all rows in order.

    Existing whole shards are kept. The fingerprint of the data set is the folder's name. Raises what `read` raises, and
    OSError if writing fails.
    """
    import pyarrow as pa
    from datasets import Dataset, concatenate_datasets

    schema = features.arrow_schema

    def write(place: Path, part: Part) -> None:
        with pa.OSFile(str(place / _FILE), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            held: list[Mapping[str, object]] = []
            characters = 0
            for row in read(part):
                held.append(row)
                characters += sum(len(value) for value in row.values() if isinstance(value, str))
                if characters >= _CHARACTERS_AT_ONCE:
                    writer.write_table(pa.Table.from_pylist(held, schema))
                    held, characters = [], 0
            writer.write_table(pa.Table.from_pylist(held, schema))

    folders = make_shards(folder, parts, write, doing="reading", say=say, workers=workers)
    rows = concatenate_datasets([Dataset.from_file(str(place / _FILE)) for place in folders])
    set_fingerprint(rows, folder.name)
    return rows
