"""What every process takes for granted: open standard streams, a working directory, a user's name and a home.

A process that is started with `>&-`, in a folder that is deleted, or in a container by a user id of its own lacks them,
and libraries then fail in their own ways. The entry points call `establish` before they import anything else.
"""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from harness.errors import UserError


def establish() -> None:
    """Open what is closed, and name what has no name. UserError if the working directory no longer exists."""
    _open_streams()
    try:
        os.getcwd()  # noqa: PTH109  # Path.cwd is the same
    except OSError as error:
        text = f"the working directory cannot be used: {error.strerror}: change to one that exists"
        raise UserError(text) from error
    _name_user()


def _open_streams() -> None:
    """Open closed standard streams to /dev/null: files that are opened later would take their numbers."""
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # as Python sets a stream that is closed when it starts
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # until the process ends


def _name_user() -> None:
    """Set USER and HOME for a user id that the system does not know, as containers run with."""
    try:
        getpass.getuser()  # torch asks it for the folder of compiled code
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = str(_own_folder())


def _own_folder() -> Path:
    """Return a folder of this user below the temporary one, the same for all processes if possible."""
    folder = Path(tempfile.gettempdir()) / f"home-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
            return folder
    return Path(tempfile.mkdtemp(prefix="home-"))
