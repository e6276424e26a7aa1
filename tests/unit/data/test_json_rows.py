"""The rows of a .json file: those that Python's own reader finds, each known by its line, and nothing passed over."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.data.formats import json_rows as json_rows_module
from harness.data.formats.json_rows import first_row, is_whole, json_rows
from harness.errors import UserError

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=6,
)
rows = st.lists(st.dictionaries(st.sampled_from(["text", "data", "ü]"]), values, max_size=3), max_size=4)
indents = st.sampled_from([None, 0, 2])


def written(found: list[dict[str, Any]], indent: int | None, where: str) -> str:
    """An array of rows, alone, or before or behind other names of an object."""
    others = {"version": "1]", "n": {"data": [3]}}
    root = {"array": found, "first": {"data": found, **others}, "last": {**others, "data": found}}[where]
    return json.dumps(root, indent=indent, ensure_ascii=False)


def read(tmp_path: Path, content: str | bytes) -> list[tuple[str, object]]:
    file = tmp_path / "a.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    assert is_whole(file)
    return [(place.removeprefix(str(file)), row) for place, row in json_rows(file)]


@given(rows, indents, st.sampled_from(["array", "first", "last"]), st.sampled_from(["", " \n", "\ufeff"]))
@same_folder
def test_what_is_written_is_read(
    tmp_path: Path, found: list[dict[str, Any]], indent: int | None, where: str, before: str
) -> None:
    assert [row for _, row in read(tmp_path, before + written(found, indent, where) + "\n ")] == found


@given(st.data(), rows, indents, st.sampled_from(["array", "first", "last"]))
@same_folder
def test_a_text_that_lacks_a_character_is_read_as_python_reads_it(
    tmp_path: Path, data: st.DataObject, found: list[dict[str, Any]], indent: int | None, where: str
) -> None:
    text = written(found, indent, where)
    lacking = data.draw(st.integers(0, len(text) - 1))
    text = text[:lacking] + text[lacking + 1 :]
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    try:
        root = json.loads(text)
        wanted = root["data"] if isinstance(root, dict) else root
        assert isinstance(wanted, list)
    except (ValueError, KeyError, AssertionError):
        with pytest.raises(UserError) as caught:
            list(json_rows(tmp_path / "a.json"))
        assert "\n" not in str(caught.value)
    else:
        assert [row for _, row in json_rows(tmp_path / "a.json")] == wanted


def test_each_row_is_known_by_the_line_on_which_it_begins(tmp_path: Path) -> None:
    text = '{"n": [\n1],\n"data":\n\n[ {"a":\n1}, 2,\n\n"x\\ny", [],\r\n3\n]\n}'
    assert read(tmp_path, text) == [(":5", {"a": 1}), (":6", 2), (":8", "x\ny"), (":8", []), (":9", 3)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param('[{"a": 1}]\n[{"a": 2}]', r"a\.json:2 is not JSON \(Extra data, column 1\)", id="two-arrays"),
        pytest.param('{"data": [1]}\n{"data": [2]}', r"a\.json:2 is not JSON \(Extra data", id="two-objects"),
        pytest.param('{"data": [1], "n": 1', r"a\.json:1 is not JSON \(Expecting '}', column 21", id="open-object"),
        pytest.param('{"data": [1], "n" 1}', r"a\.json:1 is not JSON \(Expecting ':'", id="no-colon"),
        pytest.param("[1,\n2,\n]", r"a\.json:3 is not JSON \(Expecting value, column 1", id="comma-at-the-end"),
        pytest.param("[1\n", r"a\.json:2 is not JSON \(Expecting ','", id="open-array"),
        pytest.param("3", "give an array of objects", id="number"),
        pytest.param('{\n"rows": []}', 'an object with an array under "data"', id="other-name"),
        pytest.param('{\n"data": {}}', 'an object with an array under "data"', id="no-array"),
        pytest.param("nothing", r"a\.json:1 is not JSON \(Expecting value", id="word"),
        pytest.param("[" + "9" * 5000 + "]", r"is not JSON that can be read \(Exceeds the limit", id="long-number"),
        pytest.param('{"text": ' + "[" * 10**5, "is nested too deeply", id="deep-in-an-object"),
        pytest.param("[" * 10**5, "is nested too deeply", id="deep"),
        pytest.param(b'[{"text": "\xe9"}]', r"a\.json is not UTF-8 \(byte 11\)", id="latin-1"),
    ],
)
def test_what_is_no_such_file_is_told_in_one_line(content: str | bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=words) as caught:
        list(json_rows(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "whole"),
    [
        pytest.param('[{"text": "a"}]', True, id="array"),
        pytest.param('\ufeff[{"text": "a"}]', True, id="array-behind-a-mark"),
        pytest.param('\n\n  [\n{"text": "a"}]', True, id="array-behind-blank-lines"),
        pytest.param('{\n"data": []}', True, id="object-of-several-lines"),
        pytest.param('{"data": []}', True, id="object-of-one-line"),
        pytest.param('{"text": "a"}', False, id="one-row"),
        pytest.param('\ufeff{"text": "a"}\n{"text": "b"}', False, id="rows-behind-a-mark"),
        pytest.param('{"data": "a"}\n{"data": "b"}', False, id="rows-with-a-column-data"),
        pytest.param("", True, id="empty"),
        pytest.param(
            '{"version": 1.25, "data": [' + '{"text": "a"}, ' * 20_000 + "{}]}", True, id="object-of-a-long-line"
        ),
        pytest.param('{"text": "' + "a" * 300_000 + '"}\n{"text": "b"}', False, id="a-long-row"),
        pytest.param('{"text": "' + "a" * 300_000 + '"}', False, id="a-long-row-alone"),
        pytest.param("\n" * 300_000 + '{"text": "a"}', False, id="far-behind-blank-lines"),
        pytest.param('{"text": ' + "[" * 10**5, True, id="deep"),
    ],
)
def test_a_file_is_one_value_or_one_a_line(content: str, whole: bool, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    assert is_whole(tmp_path / "a.json") is whole


@pytest.mark.parametrize("begin", ["[", '{"version": 1.25, "data": [', "[\n\n"])
def test_the_first_row_is_read_without_the_rest(begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows_module, "_READ_AT_FIRST", 1)
    row = {"text": "日本 12", "n": -1.5e-3, "nested": [{"a": []}]}
    end = "}" if begin.startswith("{") else ""
    file = tmp_path / "a.json"
    for more in (0, 3, 10**5):
        rows = [row] * (1 + more)
        file.write_text(
            f"{begin}{','.join(json.dumps(each, ensure_ascii=False) for each in rows)}]{end}", encoding="utf-8"
        )
        assert first_row(file) == (f"{file}:{1 + begin.count(chr(10))}", row) == next(json_rows(file))
    os.truncate(file, 1000)  # the rest is not looked at
    assert first_row(file) == (f"{file}:{1 + begin.count(chr(10))}", row)
    file.write_text(f"{begin}]{end}")
    assert first_row(file) is None
    file.write_bytes(f'{begin}{{"text": "'.encode() + b"\xff")
    with pytest.raises(UserError, match=rf"a\.json is not UTF-8 \(byte {len(begin) + 10}\)"):
        first_row(file)
    file.write_text(f'{begin}{{"text": ')
    with pytest.raises(UserError, match=r"a\.json:\d is not JSON"):
        first_row(file)
