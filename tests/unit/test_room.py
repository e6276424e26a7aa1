"""Why a disk takes no more is said rightly: bytes, or inodes."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.atomic import room
from harness.errors import reason

FILL = """
import sys
from pathlib import Path
from harness.atomic import replace_text, room
from harness.errors import reason
folder = Path(sys.argv[1])
try:
    for number in range(100):
        (folder / str(number)).touch()
except OSError as error:
    print(reason(error, folder / "deep"), room(folder / "deep"), sep="; ")
(folder / "0").unlink()  # a folder can be made, but no file in it
try:
    replace_text(folder / "other", "")
except OSError as error:
    print(reason(error))
"""


def test_free_bytes_are_said_of_the_folder_that_is_there(tmp_path: Path) -> None:
    free, _, place = room(tmp_path / "not" / "yet").partition(" are free in ")
    assert place == str(tmp_path) and int(free.replace(",", "")) <= shutil.disk_usage(tmp_path).total
    full = OSError(errno.ENOSPC, "No space left on device")
    assert reason(full, tmp_path) == "No space left on device"


def test_a_disk_without_inodes_is_not_said_to_have_room(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o nr_inodes=20 none {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    script = f"{mount} && exec {sys.executable} -c '{FILL}' {tmp_path}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == (
        "no inodes are free, so no file can be created; "
        f"no inodes are free in {tmp_path}, so no file can be created: remove files\n"
        "no inodes are free, so no file can be created\n"
    ), done.stderr
