"""Rows as a data set on disk: written in the shards of `shards.py`, and mapped from there as one.

So a copy is made by several processes, and one that was interrupted goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from harness.data.on_disk.cache import set_fingerprint
from harness.data.on_disk.shards import make_shards

if TYPE_CHECKING:
    from datasets import Dataset, Features

Part = TypeVar("Part")

_FILE = "rows.arrow"
_CHARACTERS_AT_ONCE = 1 << 20  # of text, held in memory before it is written


def copied(
    folder: Path,
    parts: Sequence[Part],
    read: Callable[[Part], Iterable[Mapping[str, object]]],
    features: Features,
    *,
    say: Callable[[str], None] = lambda _: None,
    workers: int | None = None,
) -> Dataset:
    """Return the rows that `read` gives of all parts, in order, written to `folder` where they are not there yet.

    The fingerprint of the data set is the folder's name. Raises what `read` raises, and OSError if it cannot write.
    """
    from datasets import Dataset, concatenate_datasets

    def write(place: Path, part: Part) -> None:
        _write(place / _FILE, read(part), features)

    folders = make_shards(folder, parts, write, doing="reading", say=say, workers=workers)
    rows = concatenate_datasets([Dataset.from_file(str(place / _FILE)) for place in folders])
    set_fingerprint(rows, folder.name)
    return rows


def _write(file: Path, rows: Iterable[Mapping[str, object]], features: Features) -> None:
    import pyarrow as pa

    schema = features.arrow_schema
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        held: list[Mapping[str, object]] = []
        characters = 0
        for row in rows:
            held.append(row)
            characters += sum(len(value) for value in row.values() if isinstance(value, str))
            if characters >= _CHARACTERS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(held, schema))
                held, characters = [], 0
        writer.write_table(pa.Table.from_pylist(held, schema))
