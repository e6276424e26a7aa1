"""The list of a checkpoint's files: what it may say, and what stands in one that somebody, or a disk, has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from harness.checkpoint import directories
from harness.checkpoint.directories import MANIFEST, checksum, contents, read_manifest, write_manifest
from harness.errors import UserError
from tests.unit.checkpoint.saved import change

NAMES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0/"), min_size=1, max_size=30)
FILES = st.dictionaries(NAMES.filter(lambda name: name != ".."), st.tuples(st.integers(0, 2**70), st.text(max_size=5)))


@given(files=FILES, step=st.integers(0, 2**70), run_id=st.text(max_size=9))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, files: directories.Files, step: int, run_id: str
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_manifest(folder, step, files, run_id)
    found = read_manifest(folder)
    assert (found.files, found.step, found.run_id) == (files, step, run_id)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x80\x81", id="no text"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"[" * 100_000, id="a deep list"),
        pytest.param(b"[" * 90 + b"]" * 90, id="deeper than any list of files"),
        pytest.param(b'{"format": 1, "step": ' + b"9" * 400 + b', "files": {}}', id="a step of 400 digits"),
        pytest.param(b'{"format": 1, "step": ' + b"9" * 40 + b', "files": {}}', id="a step of 40 digits"),
        pytest.param(b'{"format": 1, "step": 1}', id="no files"),
        pytest.param(b'{"format": 1, "files": {}}', id="no step"),
        pytest.param(b'{"step": 1, "files": {}}', id="no format"),
        pytest.param(b'{"format": "1", "step": 1, "files": {}}', id="a format in words"),
        pytest.param(b'{"format": 1, "step": 1e999, "files": {}}', id="an endless step"),
        pytest.param(b'{"format": 1, "step": -1, "files": {}}', id="a step before the first"),
        pytest.param(b'{"format": 1, "step": true, "files": {}}', id="a step that is true"),
        pytest.param(b'{"format": 1, "step": 1, "files": {"w": 3}}', id="a file without a checksum"),
        pytest.param(b'{"format": 1, "step": 1, "files": {"w": [1.5, "a"]}}', id="half a byte"),
        pytest.param(b'{"format": 1, "step": 1, "files": {"w": [Infinity, "a"]}}', id="endless bytes"),
        pytest.param(b'{"format": 1, "step": 1, "files": {"w": ["12", "a"]}}', id="bytes in words"),
        pytest.param(b'{"format": 1, "step": 1, "files": {"/etc/hosts": [1, "a"]}}', id="a file of the system"),
        pytest.param(b'{"format": 1, "step": 1, "files": {"a/../../b": [1, "a"]}}', id="a file beside the checkpoint"),
        pytest.param(b'{"format": 1, "step": 1, "files": {"a\\u0000b": [1, "a"]}}', id="a name that no file can have"),
        pytest.param(b'{"format": 1, "step": 1, "files": {"\\ud800": [1, "a"]}}', id="a name that is no text"),
    ],
)
def test_a_list_that_makes_no_sense_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(UserError, match=r"manifest\.json: cannot be read: ") as told:
        read_manifest(tmp_path)
    assert "\n" not in str(told.value)


def test_what_a_later_version_adds_is_passed_over_and_a_later_form_is_not(tmp_path: Path) -> None:
    write_manifest(tmp_path, 3, {"w": (1, "a")})
    change(tmp_path / MANIFEST, more={"of": "this"})
    assert read_manifest(tmp_path).run_id == ""
    change(tmp_path / MANIFEST, format=directories.FORMAT + 1)
    with pytest.raises(UserError, match="written by a newer version of ds-harness: resume with that version"):
        read_manifest(tmp_path)


def test_the_list_stands_in_the_order_of_names_and_is_not_in_itself(tmp_path: Path) -> None:
    for name in ("b", "a", "größe ½", "c/d"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path, 1, contents(tmp_path))
    assert list(json.loads((tmp_path / MANIFEST).read_text())["files"]) == ["a", "b", "c/d", "größe ½"]
    assert contents(tmp_path) == read_manifest(tmp_path).files


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_the_shares_of_all_ranks_are_all_files_each_once(shares: int, tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / name).write_text(name)
    parts = [contents(tmp_path, share, shares) for share in range(shares)]
    assert sorted(name for part in parts for name in part) == list("abcde")
    assert {name: file for part in parts for name, file in part.items()} == contents(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 17])
def test_a_checksum_is_that_of_the_whole_content(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "CHUNK", 8)
    (tmp_path / "w").write_bytes(content := bytes(range(size)))
    assert checksum(tmp_path / "w") == xxh3_128(content).hexdigest()


def test_files_behind_a_link_are_listed_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("weights")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(folder / "pipe")  # which would be read for ever
    assert list(contents(folder)) == ["link"]
    assert contents(folder)["link"] == (7, checksum(tmp_path / "elsewhere"))
