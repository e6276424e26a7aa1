"""Preconditions of every process: open standard streams, a working directory, a user name and a home directory.

A process started with `>&-`, in a deleted folder, or in a container under an unknown user id lacks one of them, and
libraries then fail in obscure ways. Entry points call `establish` before they import anything else.
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
    """Open closed standard streams, and set USER and HOME. Raises UserError if the working directory is gone."""
    _open_streams()
    try:
        os.getcwd()  # noqa: PTH109  # Path.cwd is the same
    except OSError as error:
        text = f"the working directory cannot be used: {error.strerror}: change to one that exists"
        raise UserError(text) from error
    _name_user()


def _open_streams() -> None:
    # Otherwise files opened later would get their descriptors, and what is printed would go into them.
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        # The system gives the lowest free number, which is this one.
        os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        # As Python sets a stream that is closed when it starts.
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # until the process ends


def _name_user() -> None:
    """Set USER and HOME for a user id without an account, as in containers."""
    try:
        # torch asks for it to name the folder of compiled code.
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = str(_own_folder())


def _own_folder() -> Path:
    """Return this user's folder in the temporary directory, the same for all processes if possible."""
    # Others may write to that directory: a folder that is theirs, or a link, is not used.
    folder = Path(tempfile.gettempdir()) / f"home-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
            return folder
    return Path(tempfile.mkdtemp(prefix="home-"))
