"""Before the first step a run finds out whether checkpoints can be written, and leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from harness.checkpoint.run_lock import LOCK, lock_directory, unlock_directory
from harness.checkpoint.tensors import tensor_writer
from harness.checkpoint.tensors.tensor_writer import OpenFiles
from harness.errors import UserError
from harness.extras.output_checks import is_lent_twice, try_saving
from tests.unit.training.full_disk import full_disk

pytestmark = pytest.mark.usefixtures("groups")


def refused(folder: Path) -> str:
    """What is said of a folder in which nothing is left."""
    with pytest.raises(UserError, match=f"^--output_dir {folder}: checkpoints cannot be written there: ") as told:
        try_saving(folder, several_hosts=False)
    assert not list(folder.iterdir()) and "\n" not in str(told.value)
    return str(told.value)


def test_a_folder_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "writing-checkpoint-0").mkdir()  # of a run that was killed while it tried
    for several_hosts in (False, True):
        try_saving(tmp_path, several_hosts=several_hosts)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["pwrite", "fsync", "reserve"])
def test_what_would_fail_at_a_save_fails_now(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(tensor_writer if call == "reserve" else os, call, fail)
    assert "Disk quota exceeded" in refused(tmp_path)


def test_a_file_that_may_not_grow_is_one_line(tmp_path: Path) -> None:
    with full_disk(100):
        assert "trial.safetensors: " in refused(tmp_path)


def test_a_file_system_that_loses_what_a_rank_writes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenFiles, "write", lambda *_: None)
    assert "the values of rank 0 are missing from the file" in refused(tmp_path)


def test_whether_a_lock_is_lent_twice_is_seen_and_nothing_is_kept(tmp_path: Path) -> None:
    assert not is_lent_twice(tmp_path)  # there is no lock at all
    with (tmp_path / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not is_lent_twice(tmp_path)
    assert is_lent_twice(tmp_path)  # as on a host that does not know of the other's lock
    lock_directory(tmp_path)
    unlock_directory(tmp_path)


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "theirs")
    assert not is_lent_twice(tmp_path)
