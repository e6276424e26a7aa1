"""Replace files atomically: a process killed half-way leaves either the old file or the new one. Imports no torch."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import lacks_inodes, reason

UNFINISHED = "unfinished-"  # prefix of unfinished files and folders
FOLDER = UNFINISHED + "files-"  # prefix of the folders whose files will replace others

_AT_FDCWD = -100  # Linux: paths are relative to the working directory
_RENAME_EXCHANGE = 2  # Linux


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, replacing an existing file. Raises OSError if that fails."""
    with replaced_files(path.parent) as folder:
        (folder / path.name).write_text(text, encoding="utf-8")


def write_output(path: Path, text: str) -> None:
    """Write `text` to a path given by the user: atomically to a file or a link's target, directly to a device or pipe.

    Raises OSError if that fails, for example for a pipe without a reader.
    """
    if not path.exists() or path.is_file():
        replace_text(Path(os.path.realpath(path)), text)
        return
    # Non-blocking only while opening: otherwise `open` would wait until somebody reads the pipe.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def replaced_files(directory: Path) -> Iterator[Path]:
    """Yield an empty folder; at the end, each file in it replaces the file at the same path in `directory`.

    Raises OSError if that fails. `directory` is then unchanged or contains some of the new files, each complete.
    """
    # In `directory`, as a rename within one file system is atomic.
    folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=directory))
    try:
        yield folder
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            # Before the rename, which may reach the disk first and leave an empty file.
            sync_file(path)
            target = directory / path.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            if target.exists() and not target.is_file():
                raise OSError(errno.EINVAL, "it is not a file: remove it", str(target))
            path.replace(target)
        sync_folder(directory)
    except OSError as error:
        # Find the reason now: removing the folder frees the inodes that were lacking.
        moved_to = error.filename2 or error.filename
        raise OSError(error.errno, reason(error, folder), moved_to) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_no_link(path: str | Path, flags: int) -> int:
    """Open a file like `os.open`, but refuse a link with OSError; also usable as an opener for `open`."""
    # In a folder that several users can write to, a link could make this process overwrite its target.
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, f"{Path(path).name} is a link: remove it", str(path)) from None
        raise


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two files or folders atomically; return False if the file system cannot (NFS)."""
    # Python has no wrapper for it, and not every C library has it either.
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return (
        rename is not None and rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
    )


def rename_folder(folder: Path, target: Path) -> Path:
    """Rename a folder and return its new path. If the file system cannot rename it, copy it and delete the original."""
    try:
        return folder.rename(target)
    except OSError as error:
        # overlayfs cannot rename a folder of a lower layer, such as one from a container image.
        if error.errno != errno.EXDEV:
            raise
    try:
        shutil.copytree(folder, target, symlinks=True)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        raise
    shutil.rmtree(folder)
    return target


def free_name(path: Path) -> Path:
    """Return the path with the first free number, such as `metrics.1.jsonl`."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on disk: a rename is durable only after that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def room(folder: Path) -> str:
    """Return a phrase about the free bytes on a folder's disk, or about inodes if none are free.

    The folder need not exist yet.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if lacks_inodes(there):
        return f"no inodes are free in {there}, so no file can be created: remove files"
    disk = shutil.disk_usage(there)
    return f"{disk.free:,} are free in {there}" if disk.total else f"{there} does not say how many are free"
