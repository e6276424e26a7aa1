"""A .json file: one array of objects, which is read whole, or one object a line, as in a .jsonl file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.data.formats.format import Extent, Format, Row
from harness.data.formats.json_rows import first_row, is_whole, json_rows
from harness.data.formats.jsonl_format import JsonlFormat


class JsonFormat(JsonlFormat):
    """An array, or lines; the beginning of the file shows which."""

    suffix = ".json"
    describes_data = True

    def extents(self, file: Path, size: int) -> Iterator[Extent]:
        """Return an array as one extent, lines as those of a .jsonl file."""
        return Format.extents(self, file, size) if is_whole(file) else super().extents(file, size)

    def in_order(self, file: Path, start: int = 0, before: int = 0) -> Iterator[Extent]:
        """Return an array as one extent, lines as those of a .jsonl file."""
        return Format.in_order(self, file) if is_whole(file) else super().in_order(file, start, before)

    def first_row(self, file: Path) -> Row | None:
        """Return the first element without reading the others, or the first line."""
        return first_row(file) if is_whole(file) else super().first_row(file)

    def rows(self, extent: Extent) -> Iterator[Row]:
        """Return a row for each element of the array, or for each line."""
        file = Path(extent.file)
        return json_rows(file) if is_whole(file) else super().rows(extent)


FORMAT = JsonFormat()
