"""Files that are replaced together: all of them, or none where something goes wrong before."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import atomic
from harness.atomic import exchange, replace_text, replaced_files, sync_file, sync_folder, write_output
from tests.unit.training.full_disk import full_disk


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r")))
def test_a_text_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("run") / "größe ½.json"
    replace_text(path, text)
    replace_text(path, text)
    assert path.read_text(encoding="utf-8") == text
    assert names(path.parent) == [path.name]


def test_a_text_that_no_file_can_hold_leaves_the_old_one(tmp_path: Path) -> None:
    replace_text(tmp_path / "run.json", "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "run.json", "new \ud800")
    assert (tmp_path / "run.json").read_text() == "old" and names(tmp_path) == ["run.json"]


def test_a_full_disk_leaves_the_old_text(tmp_path: Path) -> None:
    replace_text(tmp_path / "run.json", "old")
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        replace_text(tmp_path / "run.json", "n" * 100_000)
    assert (tmp_path / "run.json").read_text() == "old" and names(tmp_path) == ["run.json"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_disk_that_fails_at_any_file_leaves_none_of_them_half(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_text("old")
    synced: list[Path] = []

    def sync(path: Path) -> None:
        if len(synced) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(path)

    monkeypatch.setattr(atomic, "sync_file", sync)
    with pytest.raises(OSError, match="Input/output error"), replaced_files(tmp_path) as folder:
        for name in "cba":
            (folder / name).write_text("new")
    assert [(tmp_path / name).read_text() for name in "abc"] == ["new"] * number + ["old"] * (3 - number)
    assert names(tmp_path) == ["a", "b", "c"]


def test_an_error_while_files_are_written_replaces_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(RuntimeError, match="half-way"), replaced_files(tmp_path) as folder:
        (folder / "a").write_text("new")
        (folder / "b").write_text("new")
        raise RuntimeError("half-way")
    assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_files_in_folders_replace_those_of_the_same_path(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    for name in ("a", "b"):
        (tmp_path / "templates" / name).write_text("old")
    with replaced_files(tmp_path) as folder:
        for name in ("templates", "more"):
            (folder / name).mkdir()
            (folder / name / "a").write_text("new")
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"templates/a": "new", "templates/b": "old", "more/a": "new"}


def test_nothing_to_replace_leaves_nothing(tmp_path: Path) -> None:
    with replaced_files(tmp_path) as folder:
        assert folder.parent == tmp_path  # on the same disk, so that a file can be renamed
    assert names(tmp_path) == []


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "run.json").symlink_to("theirs")
    replace_text(tmp_path / "run.json", "ours")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (tmp_path / "run.json").read_text() == "ours" and not (tmp_path / "run.json").is_symlink()


def test_a_file_has_the_rights_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    replace_text(tmp_path / "run.json", "")
    assert (tmp_path / "run.json").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("path", ["missing/run.json", "file/run.json"])
def test_a_directory_that_is_none_is_the_systems_error(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"No such file or directory|Not a directory"):
        replace_text(tmp_path / path, "new")


def test_waiting_for_the_disk_leaves_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        sync_file(tmp_path / "a")
        sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_names_are_exchanged_whatever_bears_them(tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    (folder / "inside").write_text("kept")
    (link := tmp_path / "link").symlink_to("nowhere")
    assert exchange(folder, link)
    assert (link / "inside").read_text() == "kept" and folder.readlink() == Path("nowhere")
    assert not exchange(link, tmp_path / "missing") and (link / "inside").exists()


def test_output_goes_where_a_user_wants_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_output(tmp_path / "link", "text")
    assert (tmp_path / "file").read_text() == "text" and (tmp_path / "link").is_symlink()
    terminal, device = os.openpty()
    write_output(Path(os.ttyname(device)), "text")
    assert os.read(terminal, 99) == b"text"
    os.close(device)
    os.close(terminal)


def test_a_pipe_is_written_to_while_somebody_reads_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        write_output(tmp_path / "pipe", "text")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", "text")
    assert os.read(reader, 99) == b"text"
    os.close(reader)


def test_what_is_not_a_file_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(OSError, match="it is not a file: remove it"):
        replace_text(tmp_path / "run.json", "text")
    assert (tmp_path / "run.json").is_fifo() and names(tmp_path) == ["run.json"]
