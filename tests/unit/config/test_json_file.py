"""JSON that others have written is read, or refused in a few words, and never waited for."""

from __future__ import annotations

import os
import sys
import tracemalloc
from pathlib import Path

import pytest

from harness.config.values.json_file import MOST_DEPTH, parse_json, read_json, regular_bytes, require_regular_files
from harness.errors import UserError


def test_what_is_sound_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"größe": [1, 2.5, null, NaN], "limit": 1000000000000000019884624838656}')
    found = read_json(tmp_path / "a.json")
    assert found["größe"][:3] == [1, 2.5, None] and found["limit"] > 2**64
    (tmp_path / "link.json").symlink_to("a.json")
    assert read_json(tmp_path / "link.json")["limit"] == found["limit"]
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * (MOST_DEPTH + 2) + "]" * (MOST_DEPTH + 2), "nested too deeply"),
        ('{"a": ' * 500 + "1" + "}" * 500, "nested too deeply"),
        ("9" * 400, "a number has 400 digits"),
        ("-" + "9" * 9999, "a number has 10,000 digits"),
        (b"\xff", "can't decode"),
        ("", "Expecting value"),
    ],
)
def test_what_makes_no_sense_is_a_value_error_of_a_few_words(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words) as told:
        parse_json(text)
    assert len(str(told.value)) < 200


def test_only_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("[" + " " * 100 + "]")
    for path, words in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a directory")):
        with pytest.raises(ValueError, match=f"it is {words}, not a file"):
            read_json(path)
    with pytest.raises(ValueError, match="more than 99 bytes"):
        read_json(tmp_path / "large", 99)
    assert read_json(tmp_path / "large", 102) == []


def test_a_folder_with_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    require_regular_files(tmp_path)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json: is a pipe, not a file: remove it$"):
        require_regular_files(tmp_path)
    (tmp_path / "a").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="/a: is a device"):
        require_regular_files(tmp_path)


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="only root reads the kernel's log")
def test_a_file_of_the_kernel_that_waits_for_content_does_not_block() -> None:
    with pytest.raises(ValueError, match=r"no content now|Expecting value|Extra data"):
        read_json(Path("/proc/kmsg"))


def test_a_small_file_takes_little_memory_whatever_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    tracemalloc.start()
    try:
        assert read_json(tmp_path / "a.json", 1 << 28) == {"a": 1}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="such files are those of Linux")
def test_a_file_without_a_size_is_read_to_its_end_or_limit() -> None:
    mounts = Path("/proc/self/mounts")
    assert mounts.stat().st_size == 0
    assert regular_bytes(mounts, 1 << 28) == mounts.read_bytes()
    with pytest.raises(ValueError, match="it has more than 9 bytes"):
        regular_bytes(mounts, 9)
