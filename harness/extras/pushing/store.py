"""A second place for the files of a run: a URL that fsspec can write to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from harness.checkpoint.directories import MANIFEST, NAME
from harness.config.values.secrets import Secrets
from harness.errors import UserError, one_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

FLAG = "--push_checkpoints_to"
MARKER = "pushed.json"
"""Written last beside an exported model: the model's files, which are then complete. Checkpoints have a manifest."""
CANNOT = Exception
"""What a file system of fsspec raises: every client of a store has exceptions of its own, without a common base."""


@dataclass(frozen=True)
class Store:
    """A folder of a file system or of an object store.

    Attributes:
        url: the folder, without secrets.
        files: the file system.
        root: the folder's path in it.
    """

    url: str
    files: AbstractFileSystem
    root: str

    @classmethod
    def at(cls, url: str) -> Store:
        """Return the store of a URL, without connecting to it. UserError if no file system is installed for it."""
        from fsspec.core import url_to_fs

        shown = Secrets.known().masked(url)
        if "://" not in url:
            raise UserError(f"{FLAG} {shown}: give a URL, as s3://bucket/run or file:///backup/run")
        try:
            files, root = url_to_fs(url)
        except CANNOT as error:
            raise UserError(f"{FLAG} {shown}: cannot be used: {why(error)}") from error
        return cls(url=shown.rstrip("/"), files=files, root=str(root).rstrip("/"))

    def require_writable(self) -> None:
        """Write a small file, and delete it again. UserError if it cannot be written."""
        name = self.path(f".writable-{uuid4().hex}")
        try:
            self.files.makedirs(self.root, exist_ok=True)
            self.files.pipe_file(name, b"")
        except CANNOT as error:
            raise UserError(f"{FLAG} {self.url}: cannot be written: {why(error)}") from error
        with suppress(CANNOT):  # a store may let nobody delete
            self.files.rm_file(name)

    def path(self, *names: str) -> str:
        """Return the path of a file in the store."""
        return "/".join((self.root, *filter(None, names)))

    def put(self, folder: Path, names: Sequence[str], target: str = "") -> None:
        """Copy files of a local folder to the folder `target`; the last one only when the others are complete.

        Raises what the file system raises; OSError if a copy has another size than its file.
        """
        *others, last = names
        with suppress(FileNotFoundError):  # of an earlier copy, which is not complete any more
            self.files.rm_file(self.path(target, last))
        for name in others:
            self._put_file(folder / name, self.path(target, name))
        self._put_file(folder / last, self.path(target, last))

    def _put_file(self, local: Path, path: str) -> None:
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.files.put_file(str(local), path)
        self.files.invalidate_cache()
        size = self.files.info(path)["size"]
        if size != local.stat().st_size:
            raise OSError(f"{path} has {size:,} bytes of {local.stat().st_size:,}")

    def checkpoints(self) -> Iterator[tuple[int, str]]:
        """Yield step and name of all complete checkpoints, the newest first. Raises what the file system raises."""
        self.files.invalidate_cache()
        try:
            found = [path.rstrip("/").rpartition("/")[2] for path in self.files.ls(self.root, detail=False)]
        except FileNotFoundError:
            return
        for step, name in sorted(
            ((int(match[1]), name) for name in found if (match := NAME.fullmatch(name))), reverse=True
        ):
            if self.files.exists(self.path(name, MANIFEST)):
                yield step, name

    def get(self, name: str, into: Path) -> None:
        """Copy a file to the local path `into`. Raises what the file system raises."""
        into.parent.mkdir(parents=True, exist_ok=True)
        self.files.get_file(self.path(name), str(into))


def why(error: Exception) -> str:
    """Return an exception of a file system in one line: what the client of a store says, without secrets."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(Secrets.known().masked(f"{error}" or type(error).__name__))


def marker(sizes: dict[str, int]) -> str:
    """Return the content of `MARKER` for files and their sizes in bytes."""
    return json.dumps({"files": sizes}, indent=1, sort_keys=True) + "\n"
