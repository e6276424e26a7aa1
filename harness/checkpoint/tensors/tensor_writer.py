"""safetensors files that many ranks write together, each its own part of each tensor.

The layout of a file follows from the names, shapes and dtypes in it, so that no values are needed to make it: one rank
creates the files at their full size, then every rank writes what it holds to its place in them, a few MB at a time.
Nothing is mapped: ranks of several hosts may write one file, as each of them writes its own bytes alone.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from harness.config.values.json_object import JsonObject
from harness.errors import UserError, reason
from harness.hf.weights.tensor_files import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK_BYTES = 32 << 20  # the most that is converted and copied at once
NO_ROOM = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
)  # what a reservation of blocks is refused with where it cannot be met
SOON_BYTES = 1 << 20  # from which on the disk begins to write a part while the next one is copied


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor that is to be written; `trained` tells a parameter from a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @property
    def nbytes(self) -> int:
        """In the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FileRegion:
    """Where a tensor begins: a file and a byte in it."""

    path: Path
    start: int
    entry: Entry


def split_by_size(entries: Iterable[Entry], most: int) -> list[list[Entry]]:
    """Return the tensors in order, in files of at most `most` bytes, or of one larger tensor."""
    files: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not files or size + entry.nbytes > most:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return files


def require_storable(entries: Iterable[Entry]) -> None:
    """Raise UserError for a tensor of a dtype that no file holds."""
    if wrong := next((entry for entry in entries if entry.dtype not in NAMES), None):
        raise UserError(f"{wrong.name} is of {wrong.dtype}, which cannot be saved: use another dtype")


def file_regions(path: Path, entries: Sequence[Entry]) -> tuple[bytes, list[FileRegion]]:
    """Return the header of the file `path`, and the places of its tensors: wider ones first, so that each is aligned.

    UserError for a tensor of a dtype that no such file holds.
    """
    require_storable(entries)
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in ordered:
        offsets = [at, at + entry.nbytes]
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    starts = {name: 8 + len(text) + item["data_offsets"][0] for name, item in header.items() if "shape" in item}
    regions = [FileRegion(path=path, start=starts[entry.name], entry=entry) for entry in ordered]
    return len(text).to_bytes(8, "little") + text, regions


def file_size(header: bytes, regions: Sequence[FileRegion]) -> int:
    """Return the bytes of a file with this header and these tensors."""
    return len(header) + sum(region.entry.nbytes for region in regions)


def create(path: Path, header: bytes, regions: Sequence[FileRegion]) -> None:
    """Make the file at its full size, with its header; UserError if there is no room for it."""
    size = file_size(header, regions)
    try:
        with path.open("wb") as file:
            file.write(header)
            file.truncate(size)
            reserve(file.fileno(), size)  # a full disk is better found out here than by each rank
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UserError(f"{path}: {size:,} bytes cannot be written: {reason(error, path.parent)}") from error


def reserve(descriptor: int, size: int) -> None:
    """Reserve the blocks of a file, where the file system can; OSError if there is no room for them.

    Not `posix_fallocate`: where a file system cannot reserve blocks (NFS before 4.2, CephFS, Lustre on ZFS, ramfs, many
    FUSE ones) it reads and writes each block instead, which a file that is open for writing alone does not allow.
    Without a reservation, a disk that is too small is found out by the ranks that write.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)  # Linux alone has it
    if fallocate is None:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while fallocate(descriptor, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number in NO_ROOM:
            raise OSError(number, os.strerror(number))
        if number != errno.EINTR:
            return


def _is_on_nfs(path: Path) -> bool:
    """Whether a file lies on NFS, as Linux says it."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    split = ((line.split(), line.partition(" - ")[2].split()) for line in mounts)
    return any(kind[0].startswith("nfs") for fields, kind in split if kind and fields[2] == wanted)


class OpenFiles:
    """The files that a rank writes to, each opened once.

    They are open for writing alone. On NFS, a host that reads a page of which it writes a part sends the whole page to
    the server, with what other hosts' parts held when it read them. Where ranks of several hosts write one file there,
    each write therefore goes to the server at once (O_DSYNC), which then gets the written bytes alone.
    """

    def __init__(self, *, several_hosts: bool) -> None:
        self._several_hosts = several_hosts
        self._descriptors: dict[Path, int] = {}
        self._shared: set[int] = set()  # those of files on NFS

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def write(self, region: FileRegion, start: Sequence[int], values: Tensor) -> None:
        """Write `values` to the part of the tensor at `place` that begins at index `start`.

        UserError if that fails, as on a full disk.
        """
        if values.numel() == 0:
            return
        try:
            if region.path not in self._descriptors:
                at_once = self._several_hosts and _is_on_nfs(region.path)
                flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_DSYNC if at_once else 0)
                self._descriptors[region.path] = os.open(region.path, flags)
                self._shared |= {self._descriptors[region.path]} if at_once else set()
            self._write(self._descriptors[region.path], region, tuple(start), values)
        except OSError as error:
            raise UserError(f"{region.path}: cannot be written: {error.strerror}") from error

    def sync(self) -> None:
        """Wait until what was written is on the disk; UserError if that fails."""
        for path, descriptor in self._descriptors.items():
            try:
                os.fsync(descriptor)
                if descriptor in self._shared:  # what is read from here on is what the server has, of all hosts
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                raise UserError(f"{path}: cannot be written: {error.strerror}") from error

    def _write(self, descriptor: int, region: FileRegion, start: tuple[int, ...], values: Tensor) -> None:
        wide = next((dim for dim, size in enumerate(values.shape) if size > 1), None)
        if wide is not None and values.numel() * region.entry.dtype.itemsize > BLOCK_BYTES:
            half = values.shape[wide] // 2
            rest = (*start[:wide], start[wide] + half, *start[wide + 1 :])
            self._write(descriptor, region, start, values.narrow(wide, 0, half))
            self._write(descriptor, region, rest, values.narrow(wide, half, values.shape[wide] - half))
            return
        shape, size = region.entry.shape, region.entry.dtype.itemsize
        block = values.detach().to("cpu", region.entry.dtype).contiguous()
        # from dimension `inner` on, all of the tensor is written: these values lie one after the other in the file
        inner = next((dim for dim in reversed(range(len(shape))) if block.shape[dim] != shape[dim]), 0)
        runs = block.view(prod(block.shape[:inner]), -1)
        strides = [prod(shape[dim + 1 :]) * size for dim in range(len(shape))]
        at = offset = region.start + sum(first * stride for first, stride in zip(start, strides, strict=True))
        for index, run in zip(product(*map(range, block.shape[:inner])), runs, strict=True):
            offset = at + sum(each * stride for each, stride in zip(index, strides, strict=False))
            _write_all(descriptor, memoryview(run.view(torch.uint8).numpy()), offset)
        if block.nbytes >= SOON_BYTES and hasattr(os, "posix_fadvise"):
            # Linux then begins to write these pages to the disk, and waits for nothing
            os.posix_fadvise(descriptor, at, offset + runs[-1].nbytes - at, os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, rest: memoryview, start: int) -> None:
    while rest:
        count = os.pwrite(descriptor, rest, start)
        rest, start = rest[count:], start + count


def index_content(files: Mapping[str, Sequence[Entry]]) -> JsonObject:
    """Return HuggingFace's index, which says which file holds which tensor."""
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    count = sum(prod(entry.shape) for entries in files.values() for entry in entries if entry.trained)
    weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
    return {"metadata": {"total_parameters": count, "total_size": total}, "weight_map": weight_map}
