"""Processes without standard streams, a working directory, a user's name or a home."""

from __future__ import annotations

import getpass
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.preconditions import establish

CLOSED = """
import os, sys
from harness.preconditions import establish
establish()
print("said"); print("said", file=sys.stderr); sys.stdout.flush(); sys.stderr.flush()
assert os.open(os.devnull, os.O_RDONLY) > 2
"""


@pytest.mark.parametrize("closed", ["1", "2", "1 2", "0 1 2"])
def test_closed_streams_are_opened_before_a_file_takes_their_numbers(closed: str) -> None:
    redirections = " ".join(f"{number}>&-" for number in closed.split())
    done = subprocess.run(["sh", "-c", f'"$0" -c "$1" {redirections}', sys.executable, CLOSED], check=False, timeout=60)
    assert done.returncode == 0


def test_a_working_directory_that_is_deleted_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UserError, match="the working directory cannot be used: No such file or directory: change to"):
        establish()


def test_a_user_that_the_system_does_not_know_gets_a_name_and_a_home_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    establish()
    assert getpass.getuser() == str(os.getuid()) and Path.home() == tmp_path / f"home-{os.getuid()}"
    assert Path.home().stat().st_mode & 0o777 == 0o700


def test_a_home_that_another_user_has_put_there_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"home-{os.getuid()}").symlink_to("theirs")
    monkeypatch.setattr(os, "environ", {"USER": "me"})
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    establish()
    assert Path(os.environ["HOME"]).is_dir() and not list((tmp_path / "theirs").iterdir())
    assert os.environ["HOME"] != str(tmp_path / f"home-{os.getuid()}")
