"""Allow one run at a time in an output directory: rank 0 holds a file lock until its process ends.

The locked file contains the holder's process and host. Imports no torch.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from harness.atomic import open_no_link
from harness.config.values.json_file import regular_bytes
from harness.errors import UserError, reason

LOCK = "run.lock"
WAIT_S = 5.0  # for a previous run that is about to exit
MARK = [uuid4().hex[:8]]
"""A unique name of this process; a list, so that a forked child can change it."""
HELD: dict[Path, int] = {}
"""Directory -> file descriptor of the lock that this process holds on it."""


def lock_directory(directory: Path) -> None:
    """Lock a directory, creating it if needed; lock it again if it was deleted and recreated.

    Waits up to 5 seconds. Raises UserError if another process still holds the lock, or the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + WAIT_S
        while not _is_held(directory) and not _try_to_lock(directory):
            if time.monotonic() > deadline:
                raise UserError(
                    f"--output_dir {directory}: another run is using it ({_holder(directory)}): "
                    "wait for its end, or give another directory"
                )
            time.sleep(0.1)
    except OSError as error:
        raise UserError(f"--output_dir {directory}: cannot be written: {reason(error, directory)}") from error


def unlock_directory(directory: Path) -> None:
    """Release the lock if this process holds it."""
    if (descriptor := HELD.pop(directory, None)) is not None:
        os.close(descriptor)


def _holder(directory: Path) -> str:
    """Return the process and host named in the lock file."""
    with suppress(OSError, ValueError):
        return regular_bytes(directory / LOCK, 1000).decode().partition("\n")[0]
    return "its lock does not say which"


def _is_held(directory: Path) -> bool:
    """Return whether this process holds the lock on the current lock file.

    Raises UserError if another process has since written its name there: the file system granted the lock to both.
    """
    with suppress(FileNotFoundError, KeyError):
        if os.path.samestat((directory / LOCK).lstat(), os.fstat(HELD[directory])):
            written = ""
            with suppress(OSError, ValueError):
                written = regular_bytes(directory / LOCK, 1000).decode()
            # The file is empty if the disk was full.
            if written.strip() and written != _content():
                raise UserError(
                    f"--output_dir {directory}: another run has begun there ({_holder(directory)}), which its file "
                    "system does not prevent by a lock: end one of them"
                )
            return True
    return False


def _content() -> str:
    # Containers may have equal process ids and host names; MARK differs.
    return f"process {os.getpid()} on {socket.gethostname()}\n{MARK[0]}\n"


def _try_to_lock(directory: Path) -> bool:
    # A lock that this process still holds is on a deleted file: release it, and lock the new one.
    unlock_directory(directory)
    descriptor = open_no_link(directory / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:
        # A file system without locks: the name in the file has to do, see `_is_held`.
        pass
    # Left open: closing the file would release the lock.
    HELD[directory] = descriptor
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _content().encode(), 0)
    return True


def _forget() -> None:
    # A forked child inherits the descriptor, and a lock lives until all copies are closed: it would outlive the run.
    MARK[0] = uuid4().hex[:8]
    for directory in list(HELD):
        unlock_directory(directory)


os.register_at_fork(after_in_child=_forget)
