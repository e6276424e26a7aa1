"""The list of a checkpoint's files, `manifest.json`: written last, so a checkpoint that has one was whole.

Importing this needs no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from xxhash import xxh3_128

from harness.config.values.json_file import read_json
from harness.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
CHUNK = 16 << 20

Files = dict[str, tuple[int, str]]
"""Size in bytes and XXH3 (128 bits, hexadecimal) of each file, by its path in the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of: the optimizer steps done, the run that saved it, and its files."""

    step: int
    run_id: str
    files: Files


def contents(folder: Path, share: int = 0, shares: int = 1) -> Files:
    """Return every `shares`-th file in a folder, from number `share` on."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): (path.stat().st_size, checksum(path)) for path in files[share::shares]}


def write_manifest(folder: Path, step: int, files: Mapping[str, tuple[int, str]], run_id: str = "") -> None:
    """Write the list of a checkpoint's files beside them."""
    stated = {"format": FORMAT, "step": step, "run_id": run_id, "files": dict(sorted(files.items()))}
    text = json.dumps(stated, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the list of a checkpoint's files; UserError if it cannot be read."""
    path = checkpoint / MANIFEST
    try:
        stated = read_json(path)
        if stated["format"] > FORMAT:
            raise UserError(f"{path} was written by a newer version of ds-harness: resume with that version")
        files = {_inside(name): (_count(size), str(digest)) for name, (size, digest) in stated["files"].items()}
        return Manifest(step=_count(stated["step"]), run_id=str(stated.get("run_id", "")), files=files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _inside(name: str) -> str:
    """Return the path of a file in the checkpoint; ValueError for one that leads elsewhere, or is none."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or b"\0" in os.fsencode(name):
        raise ValueError(f"{name!r} is no file of it")
    return name


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= 2**80:  # nobody counts further
        raise ValueError(f"{value!r} is no count")
    return value


def checksum(path: Path) -> str:
    """Return the XXH3 of a file's content."""
    total, at, chunk = xxh3_128(), 0, bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            at += count
            if hasattr(os, "posix_fadvise"):  # the disk reads what follows while this is hashed
                os.posix_fadvise(file.fileno(), at, CHUNK, os.POSIX_FADV_WILLNEED)
            total.update(memoryview(chunk)[:count])
    return total.hexdigest()
