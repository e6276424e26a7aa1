"""A file system in user space that shows a folder and lacks what many lack: fallocate, hard links, locks, exchanges.

    python -m tests.e2e.plain_fuse FOLDER MOUNT

Needs mfusepy and libfuse. It runs until it is unmounted.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import mfusepy


class Plain(mfusepy.Operations):
    """Passes on what every file system has."""

    use_ns = True

    def __init__(self, root: str) -> None:
        self.root = root

    def _at(self, path: str) -> str:
        return self.root + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path))
        names = ("st_atime_ns", "st_ctime_ns", "st_mtime_ns")
        shown = {name.removesuffix("_ns"): getattr(found, name) for name in names}
        return shown | {
            name: getattr(found, name) for name in ("st_gid", "st_mode", "st_nlink", "st_size", "st_uid", "st_ino")
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]  # noqa: PTH208

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)  # noqa: PTH102
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))  # noqa: PTH106
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))  # noqa: PTH108
        return 0

    def rename(self, old: str, new: str, flags: int = 0) -> int:
        if flags:
            raise mfusepy.FuseOSError(errno.EINVAL)
        os.rename(self._at(old), self._at(new))  # noqa: PTH104
        return 0

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path), length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._at(path), ns=times)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        Path(self._at(path)).chmod(mode)
        return 0

    def statfs(self, path: str) -> dict[str, Any]:
        found = os.statvfs(self._at(path))
        names = (
            "f_bavail",
            "f_bfree",
            "f_blocks",
            "f_bsize",
            "f_favail",
            "f_ffree",
            "f_files",
            "f_frsize",
            "f_namemax",
        )
        return {name: getattr(found, name) for name in names}


if __name__ == "__main__":
    mfusepy.FUSE(Plain(sys.argv[1]), sys.argv[2], foreground=True, nothreads=True)
