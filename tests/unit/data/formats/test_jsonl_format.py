"""Lines of JSON: the rows come back, in parts of any size, and a wrong line is known by its number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.data.formats import format_of
from harness.errors import UserError
from tests.support.formats import RowFormatTests, characters, same_folder, texts


class TestJsonl(RowFormatTests):
    suffix = ".jsonl"

    def write(self, file: Path, rows: Sequence[Mapping[str, object]]) -> None:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.write_text(lines, encoding="utf-8", newline="")


@given(st.lists(characters, min_size=1, max_size=9), st.integers(1, 40), st.sampled_from(["\n", "\r\n", "\n\n"]))
@same_folder
def test_lines_are_read_in_parts_of_any_size_as_in_one(tmp_path: Path, written: list[str], size: int, end: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(end.join(json.dumps({"text": text}) for text in written).encode())
    parts = list(format_of(file).extents(file, size))
    assert [(part.start, part.stop) for part in parts[1:]] == [
        (before.stop, min(before.stop + size, file.stat().st_size)) for before in parts[:-1]
    ]
    assert texts(file, parts) == written


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 30))
@same_folder
def test_a_wrong_row_is_known_by_its_line_in_whichever_part_it_stands(
    tmp_path: Path, blank: list[int], size: int
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join('{"text": "a"}' + "\n" * lines for lines in blank) + '{"text": 3}\n')
    with pytest.raises(UserError, match=rf"a\.jsonl:{sum(blank) + 1}: `text` is int"):
        texts(file, list(format_of(file).extents(file, size)))


@pytest.mark.parametrize("content", ["\n \n"], ids=["blank-lines"])
def test_a_file_without_a_row_is_of_no_kind(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    assert format_of(tmp_path / "a.jsonl").kind(tmp_path / "a.jsonl") is None


def test_a_number_too_long_for_python_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b", "id": ' + "9" * 5000 + "}\n")
    with pytest.raises(UserError, match=r"a\.jsonl:2 is not JSON that can be read \(Exceeds the limit"):
        texts(tmp_path / "a.jsonl")
