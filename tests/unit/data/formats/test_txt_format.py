"""A .txt file is one document, read in parts of any size."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from harness.data.formats import format_of
from harness.data.formats.txt_format import decodes
from harness.data.rows.pieces import PIECE_CHARACTERS
from harness.data.streaming.rows import FileRows


@pytest.mark.parametrize("size", [1, PIECE_CHARACTERS - 1, PIECE_CHARACTERS, 3 * PIECE_CHARACTERS])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_text_is_read_in_parts_of_any_size_and_no_character_is_cut(size: int, shift: int, tmp_path: Path) -> None:
    content = "x" * shift + "🙂" * (PIECE_CHARACTERS // 2)
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    parts = list(format_of(tmp_path / "a.txt").extents(tmp_path / "a.txt", size))
    found = [row for part in parts for row in format_of(Path(part.file)).documents(part, "text")]
    assert "".join(str(row["text"]) for row in found) == content
    assert [row["part"] for row in found] == list(range(len(found)))


def test_a_text_is_streamed_over_and_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("last")
    found = FileRows([tmp_path / "a.txt", tmp_path / "b.txt"], "text").since(1, {})
    wanted = [(1, 0, "last"), (0, 0, "one"), (1, 0, "last")]
    assert [(file, row, each["text"]) for file, row, each in itertools.islice(found, len(wanted))] == wanted


def test_only_a_file_that_is_utf_8_throughout_decodes(tmp_path: Path) -> None:
    for name, content in (("a", "日本".encode()), ("b", b"a" * 100 + b"\xff"), ("c", b"")):
        (tmp_path / name).write_bytes(content)
    assert [decodes(tmp_path / name) for name in ("a", "b", "c", "d")] == [True, False, True, False]
