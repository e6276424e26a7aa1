"""Row groups of a .parquet file: parts of any number, columns without rows, and every damage in one line."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.data.formats import format_of
from harness.errors import UserError
from tests.support.formats import RowFormatTests, texts


class TestParquet(RowFormatTests):
    suffix = ".parquet"

    def write(self, file: Path, rows: Sequence[Mapping[str, object]]) -> None:
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), file, row_group_size=2)


def test_the_groups_of_a_parquet_file_are_its_parts(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    TestParquet().write(file, [{"text": text} for text in "abcde"])
    parts = list(format_of(file).extents(file, 1))
    assert [(part.start, part.stop, part.before) for part in parts] == [(0, 1, 0), (1, 2, 2), (2, 3, 4)]
    assert texts(file, parts) == texts(file) == list("abcde")
    TestParquet().write(file, [{"text": text} for text in ("a", "b", "c", None)])
    with pytest.raises(UserError, match=r"a\.parquet, row 4: `text` is missing"):
        texts(file, [list(format_of(file).extents(file, 1))[1]])


def test_a_parquet_file_without_a_row_is_of_no_kind_but_its_columns_are_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), file)
    assert format_of(file).kind(file) is None
    pq.write_table(pa.table({"content": pa.array([], pa.string())}), file)
    with pytest.raises(UserError, match=r"a\.parquet has no column `text`"):
        format_of(file).kind(file)


def test_a_damaged_parquet_file_is_told_with_the_row_before(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"row {number} " * 50 for number in range(100)]}), file, compression="snappy")
    content = bytearray(file.read_bytes())
    content[4:200] = bytes(196)
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet is damaged after row 0: Couldn't deserialize") as caught:
        texts(file)
    assert "\n" not in str(caught.value)


def test_every_damage_of_a_parquet_file_is_one_line(tmp_path: Path) -> None:
    file, choose = tmp_path / "a.parquet", random.Random(0)
    chats = [
        {"messages": [{"role": "user", "content": "é" * n}, {"role": "assistant", "content": "a"}]} for n in (1, 9)
    ]
    pq.write_table(pa.Table.from_pylist(chats * 9), tmp_path / "chats.parquet", row_group_size=7)
    texts_of = pa.table({"text": [f"日本 {n}" * 9 for n in range(40)]})
    pq.write_table(texts_of, tmp_path / "plain.parquet", compression="none", use_dictionary=False)
    told = 0
    for source in (tmp_path / "chats.parquet", tmp_path / "plain.parquet"):
        content = source.read_bytes()
        for _ in range(150):
            flipped = bytearray(content)
            flipped[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
            file.write_bytes(flipped)
            try:
                kind = format_of(file).kind(file)
                assert kind is not None
                list(format_of(file).documents(format_of(file).whole(file), kind))
            except UserError as error:
                assert str(file) in str(error) and "\n" not in str(error)
                told += 1
    assert told > 100
    pq.write_table(texts_of, file, compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(file.read_bytes())
    content[content.index(b"39", 4)] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet is damaged after row 0: .*CRC"):
        texts(file)
