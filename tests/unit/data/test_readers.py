"""The rows of a file in each form: the same ones, whole or in parts of any size, and each known by its place."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.arguments.themes.flags import Help
from harness.arguments.themes.script import ScriptArguments
from harness.data.files import formats
from harness.data.files.format import Extent
from harness.data.files.formats import SUFFIXES, format_of, planned
from harness.data.files.pieces import PIECE_CHARACTERS
from harness.data.files.txt_format import decodes
from harness.errors import UserError

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
# what a line, a field or a JSON text could take for its own end
characters = st.text(alphabet='ab ,"\\\n\r\t\u2028\x85{}[]:é🙂', max_size=12)


def as_jsonl(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")


def as_array(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def as_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)


def as_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=2)


FORMS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "a.jsonl": as_jsonl,
    "rows.json": as_jsonl,
    "array.json": as_array,
    "a.csv": as_csv,
    "a.parquet": as_parquet,
}
OF_STRINGS = {"a.csv"}  # no field is a list, so they hold no conversations


def test_every_format_is_read_here_and_named_where_files_are_given() -> None:
    assert {Path(name).suffix for name in FORMS} | {".txt"} == set(SUFFIXES)
    (given,) = (item for item in fields(ScriptArguments) if item.name == "train_file")
    assert [suffix for suffix in SUFFIXES if suffix not in Help.of(given)] == []


def texts(file: Path, parts: list[Extent] | None = None) -> list[str]:
    """The texts of a file, or of parts of it; of a long one the pieces are joined."""
    found: list[str] = []
    form = format_of(file)
    for row in (row for part in parts or [form.whole(file)] for row in form.documents(part, "text")):
        if row["part"]:
            found[-1] += str(row["text"])
        else:
            found.append(str(row["text"]))
    return found


@pytest.mark.parametrize("name", FORMS)
@given(st.lists(characters, min_size=1, max_size=5))
@same_folder
def test_a_text_comes_back_from_every_form(name: str, tmp_path: Path, written: list[str]) -> None:
    FORMS[name](tmp_path / name, [{"text": text, "id": str(number)} for number, text in enumerate(written)])
    assert format_of(tmp_path / name).kind(tmp_path / name) == "text"
    assert texts(tmp_path / name) == written


@given(st.lists(characters, min_size=1, max_size=9), st.integers(1, 40), st.sampled_from(["\n", "\r\n", "\n\n"]))
@same_folder
def test_lines_are_read_in_parts_of_any_size_as_in_one(tmp_path: Path, written: list[str], size: int, end: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(end.join(json.dumps({"text": text}) for text in written).encode())
    parts = list(formats._extents(file, size))
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
        texts(file, list(formats._extents(file, size)))


@pytest.mark.parametrize("size", [1, PIECE_CHARACTERS - 1, PIECE_CHARACTERS, 3 * PIECE_CHARACTERS])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_text_is_read_in_parts_of_any_size_and_no_character_is_cut(size: int, shift: int, tmp_path: Path) -> None:
    content = "x" * shift + "🙂" * (PIECE_CHARACTERS // 2)
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    parts = list(formats._extents(tmp_path / "a.txt", size))
    found = [row for part in parts for row in format_of(Path(part.file)).documents(part, "text")]
    assert "".join(str(row["text"]) for row in found) == content
    assert [row["part"] for row in found] == list(range(len(found)))


def test_the_groups_of_a_parquet_file_are_its_parts(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    as_parquet(file, [{"text": text} for text in "abcde"])
    parts = list(formats._extents(file, 1))
    assert [(part.start, part.stop, part.before) for part in parts] == [(0, 1, 0), (1, 2, 2), (2, 3, 4)]
    assert texts(file, parts) == texts(file) == list("abcde")
    as_parquet(file, [{"text": text} for text in ("a", "b", "c", None)])
    with pytest.raises(UserError, match=r"a\.parquet, row 4: `text` is missing"):
        texts(file, [list(formats._extents(file, 1))[1]])


def test_a_plan_is_kept_and_its_parts_stand_in_the_order_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "shard_bytes", lambda total: 30)
    as_jsonl(tmp_path / "a.jsonl", [{"text": str(number)} for number in range(9)])
    as_csv(tmp_path / "b.csv", [{"text": "b" * 99}])
    (tmp_path / "c.txt").write_text("c")
    (tmp_path / "d.txt").touch()
    files = [tmp_path / name for name in ("a.jsonl", "b.csv", "c.txt", "d.txt")]
    shards = planned(files, tmp_path / "plan")
    parts = [part for shard in shards for part in shard]
    assert list(dict.fromkeys(part.file for part in parts)) == list(map(str, files))
    assert [texts(file, [part for part in parts if part.file == str(file)]) for file in files] == [
        [str(number) for number in range(9)],
        ["b" * 99],
        ["c"],
        [""],
    ]
    # a shard is closed as soon as it is full, and none is empty
    assert all(sum(part.size for part in shard[:-1]) < 30 for shard in shards) and all(shards)
    files[0].unlink()
    assert planned(files, tmp_path / "plan") == shards


@pytest.mark.parametrize("name", [name for name in FORMS if name not in OF_STRINGS])
def test_conversations_come_back_from_every_form_that_can_hold_them(name: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a\n"}, {"role": "assistant", "content": "日本"}]
    FORMS[name](tmp_path / name, [{"messages": messages, "id": 1}] * 3)
    assert format_of(tmp_path / name).kind(tmp_path / name) == "messages"
    form = format_of(tmp_path / name)
    found = list(form.documents(form.whole(tmp_path / name), "messages"))
    assert [json.loads(str(row["conversation"]))["messages"] for row in found] == [messages] * 3
    assert len({row["place"] for row in found}) == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("a.jsonl", "\n \n", id="blank-lines"),
        pytest.param("a.json", " [ ] ", id="empty-array"),
        pytest.param("a.json", '{"data": []}', id="empty-data"),
        pytest.param("a.csv", "text,id\n", id="header-alone"),
        pytest.param("a.csv", "", id="nothing"),
    ],
)
def test_a_file_without_a_row_is_of_no_kind(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert format_of(tmp_path / name).kind(tmp_path / name) is None


def test_a_parquet_file_without_a_row_is_of_no_kind_but_its_columns_are_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), file)
    assert format_of(file).kind(file) is None
    pq.write_table(pa.table({"content": pa.array([], pa.string())}), file)
    with pytest.raises(UserError, match=r"a\.parquet has no column `text`"):
        format_of(file).kind(file)


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


def test_a_number_too_long_for_python_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b", "id": ' + "9" * 5000 + "}\n")
    with pytest.raises(UserError, match=r"a\.jsonl:2 is not JSON that can be read \(Exceeds the limit"):
        texts(tmp_path / "a.jsonl")


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


def test_only_a_file_that_is_utf_8_throughout_decodes(tmp_path: Path) -> None:
    for name, content in (("a", "日本".encode()), ("b", b"a" * 100 + b"\xff"), ("c", b"")):
        (tmp_path / name).write_bytes(content)
    assert [decodes(tmp_path / name) for name in ("a", "b", "c", "d")] == [True, False, True, False]
