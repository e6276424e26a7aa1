"""Folders that are whole or not there: what is in one is noted beside it, and what was cut or changed since is found.

Several processes may make the same folder, of several hosts and containers that share the disk: each makes its own, and
the first gives it the name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NOTE = "whole.json"
"""In each folder: size, time of the last change and digest of every other file."""

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def is_whole(folder: Path) -> bool:
    """Whether a folder holds what was written into it.

    A file that has the size and the time of its last change that were noted is not read; any other is.
    """
    try:
        if not (folder / NOTE).is_file():  # a pipe would be waited for
            return False
        noted = json.loads((folder / NOTE).read_bytes())
        touched = {name for name, was in noted.items() if _stamp(folder / name) != was["stamp"]}
        if any(_digest(folder / name) != noted[name]["digest"] for name in touched):
            return False
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
    if touched:  # a copy, for instance: the next start need not read it again
        with suppress(OSError):
            _note(folder, {name: was["digest"] for name, was in noted.items()})
    return bool(noted)


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder, which gets its name when all of it is on disk, unless another process was first."""
    made = _beside(folder)
    made.mkdir(parents=True)
    try:
        write(made)
        for file in made.iterdir():
            _flush(file)
        _note(made, {file.name: _digest(file) for file in made.iterdir()})
        _flush(made)
        _take_name(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _take_name(made: Path, folder: Path) -> None:
    while not is_whole(folder):
        try:
            made.rename(folder)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            damaged = _beside(folder)
            with suppress(FileNotFoundError):  # another process has moved it out of the way
                folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            _flush(folder.parent)
            return


def _beside(folder: Path) -> Path:
    """Return a name that no other process takes: processes of two containers may have the same number."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(8)}")


def _note(folder: Path, digests: dict[str, str]) -> None:
    """Write down what is in a folder."""
    noted = {name: {"stamp": _stamp(folder / name), "digest": digest} for name, digest in digests.items()}
    unfinished = folder / f"{NOTE}.{secrets.token_hex(8)}"
    try:
        unfinished.write_text(json.dumps(noted), encoding="utf-8")
        _flush(unfinished)
        unfinished.replace(folder / NOTE)
    finally:
        unfinished.unlink(missing_ok=True)


def _stamp(file: Path) -> list[int]:
    """Return size and time of the last change."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Have the disk keep a file or folder; OSError if it cannot, but not where it has no such command."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
