"""Formats are found in their folder and tested alike; files of any format are divided into shards."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from harness.data.files import extents
from harness.data.files.extents import planned
from harness.data.formats import FORMATS, PLAIN_TEXT, TOKEN_FORMATS, format_of
from tests.support.formats import texts

TESTS = Path(__file__).parent / "formats"


def test_formats_are_named_in_one_order() -> None:
    """Plain text first, the others by suffix."""
    assert list(FORMATS) == [".txt", *sorted(FORMATS.keys() - {".txt"})]
    assert set(FORMATS) >= {".csv", ".json", ".jsonl", ".parquet"} and set(TOKEN_FORMATS) >= {".bin", ".ds"}
    assert set(FORMATS).isdisjoint(TOKEN_FORMATS)
    assert format_of(Path("a.jsonl")) is FORMATS[".jsonl"] and format_of(Path("a.py")) is PLAIN_TEXT


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_has_tests_of_its_own(suffix: str) -> None:
    module = Path(inspect.getfile(type(FORMATS[suffix]))).stem
    assert (TESTS / f"test_{module}.py").is_file()


def test_a_plan_is_kept_and_its_parts_stand_in_the_order_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "shard_bytes", lambda total: 30)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(9)))
    (tmp_path / "b.csv").write_text(f"text\n{'b' * 99}\n")
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
