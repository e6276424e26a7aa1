"""Replace files so that a process that is killed half-way leaves the old or the new one; say why a disk is full.

Importing this needs no torch.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import lacks_inodes, reason

UNFINISHED = "unfinished-"  # how the names of files and folders begin that nobody should read yet
FOLDER = UNFINISHED + "files-"  # and those of the folders in which files wait to replace others

_HERE = -100  # Linux: AT_FDCWD, so that paths are as usual
_EXCHANGE = 2  # Linux: RENAME_EXCHANGE


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one step."""
    with replaced_files(path.parent) as folder:
        (folder / path.name).write_text(text, encoding="utf-8")


@contextmanager
def replaced_files(directory: Path) -> Iterator[Path]:
    """Give a folder to write files to; at the end each of them replaces the one of its name in `directory`."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=directory))
    try:
        yield folder
        for path in sorted(folder.iterdir()):
            sync_file(path)
            path.replace(directory / path.name)
        sync_folder(directory)
    except OSError as error:  # said now, as inodes are free again when the folder is removed
        raise OSError(error.errno, reason(error, folder), error.filename) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Give two files or folders each other's name in one step; False where the file system cannot, as on NFS."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc has it, other C libraries may not
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


def sync_file(path: Path) -> None:
    """Wait until the file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def room(folder: Path) -> str:
    """Say what is free where a folder is or would be: bytes, and inodes where none are left."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if lacks_inodes(there):
        return f"no inodes are free in {there}, so no file can be created: remove files"
    disk = shutil.disk_usage(there)
    return f"{disk.free:,} are free in {there}" if disk.total else f"{there} does not say how many are free"
