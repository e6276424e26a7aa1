"""Records of a .csv file: their fields are texts, and what is not CSV is told with its line."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from harness.data.formats import format_of
from harness.errors import UserError
from tests.support.formats import RowFormatTests, texts


class TestCsv(RowFormatTests):
    suffix = ".csv"
    holds_lists = False

    def write(self, file: Path, rows: Sequence[Mapping[str, object]]) -> None:
        with file.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(rows)


@pytest.mark.parametrize("content", ["text,id\n", ""], ids=["header-alone", "nothing"])
def test_a_file_without_a_row_is_of_no_kind(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert format_of(tmp_path / "a.csv").kind(tmp_path / "a.csv") is None


@pytest.mark.parametrize(
    ("content", "found"),
    [
        pytest.param("text\n\na\n\n\nb\n", ["a", "b"], id="blank-lines-are-no-rows"),
        pytest.param("id,text\r\n1,\r\n", [""], id="an-empty-field-is-an-empty-text"),
        pytest.param("text\ra\rb", ["a", "b"], id="old-ends-of-lines"),
        pytest.param('text\n"a ""b"" c"\n', ['a "b" c'], id="quotes-in-quotes"),
        pytest.param("text\n" + "x" * 200_000 + "\n", ["x" * 200_000], id="a-field-beyond-the-readers-own-limit"),
    ],
)
def test_fields_of_a_csv_file_are_texts(content: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content, newline="")
    assert texts(tmp_path / "a.csv") == found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"text,id\na,1\nb\n", r"a\.csv:3 does not have as many fields as the header", id="too-few"),
        pytest.param(
            b"text\na\nb,c\n", r"a\.csv:3 does not have as many fields .*quote fields that contain a", id="too-many"
        ),
        pytest.param(b'text\n"a\nb"c\n', r"a\.csv:2 is not CSV", id="behind-a-quote"),
        pytest.param(b"text,id\n\n\na,1\n\nb\n", r"a\.csv:6 does not have as many fields", id="behind-blank-lines"),
        pytest.param(b'text\n"a\n', r"a\.csv:2 is not CSV \(unexpected end of data\)", id="open-quote"),
        pytest.param(b"text\na\n\xe9\n", r"a\.csv is not UTF-8 after line \d: convert it", id="latin-1"),
    ],
)
def test_what_is_no_csv_is_told_with_its_line(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=words):
        texts(tmp_path / "a.csv")
