"""A .json file: an array of objects or lines, as its beginning shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from harness.data.formats import format_of
from tests.support.formats import RowFormatTests


class TestArray(RowFormatTests):
    suffix = ".json"

    def write(self, file: Path, rows: Sequence[Mapping[str, object]]) -> None:
        file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


class TestLines(RowFormatTests):
    suffix = ".json"

    def write(self, file: Path, rows: Sequence[Mapping[str, object]]) -> None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("content", [" [ ] ", '{"data": []}'], ids=["empty-array", "empty-data"])
def test_a_file_without_a_row_is_of_no_kind(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    assert format_of(tmp_path / "a.json").kind(tmp_path / "a.json") is None
