"""The shards into which files of any format are divided."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path

from harness.data.formats import Extent, format_of
from harness.data.on_disk.shards import make_shards, shard_bytes
from harness.errors import UserError


def planned(files: Sequence[Path], folder: Path) -> list[list[Extent]]:
    """Return the extents of each shard of these files, in order; all shards are about equally large.

    To find them may take a pass through the files, to count lines: the plan is cached in `folder`.
    """

    def write(shard: Path, _: None) -> None:
        size = shard_bytes(sum(file.stat().st_size for file in files))
        shards: list[list[tuple[object, ...]]] = [[]]
        filled = 0
        for extent in (extent for file in files for extent in _extents(file, size)):
            if filled >= size:
                shards.append([])
                filled = 0
            shards[-1].append(astuple(extent))
            filled += extent.size
        (shard / "shards.json").write_text(json.dumps(shards), encoding="utf-8")

    (shard,) = make_shards(folder / "plan", [None], write, doing="counting lines")
    shards = json.loads((shard / "shards.json").read_text(encoding="utf-8"))
    return [[Extent(*extent) for extent in extents] for extents in shards]


def _extents(file: Path, size: int) -> Iterator[Extent]:
    try:
        yield from format_of(file).extents(file, size)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
