"""Say why a disk takes no more: of a file system that has room but no inodes, free bytes would say the contrary."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


def room(folder: Path) -> str:
    """Say what is free where a folder is or would be: bytes, and inodes where none are left."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if _lacks_inodes(there):
        return f"no inodes are free in {there}, so no file can be created: remove files"
    disk = shutil.disk_usage(there)
    return f"{disk.free:,} are free in {there}" if disk.total else f"{there} does not say how many are free"


def reason(error: OSError, folder: Path) -> str:
    """Return why something could not be written to a folder."""
    if error.errno == errno.ENOSPC:
        there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        if _lacks_inodes(there):
            return "no inodes are free, so no file can be created"
    return error.strerror or str(error)


def _lacks_inodes(folder: Path) -> bool:
    found = os.statvfs(folder)
    return found.f_files > 0 and found.f_ffree == 0  # some file systems count none at all
