"""Write safetensors files from many ranks, each rank its own shard of each tensor.

A file's layout follows from names, shapes and dtypes alone. One rank creates the files at full size, then every rank
writes its values at their offsets, a few MB at a time. Files are written with `pwrite`: a memory map writes whole
pages, so hosts that share a page would overwrite each other's bytes.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from harness.atomic import open_no_link
from harness.config.values.json_object import JsonObject
from harness.errors import UserError, reason
from harness.hf.weights.tensor_files import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK_BYTES = 32 << 20  # most bytes converted and copied at a time
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of fallocate that mean a full disk or a quota
SOON_BYTES = 1 << 20  # a write of at least this size goes to disk at once, while the next one is copied


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor to write; `trained` says whether it is a parameter or a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @property
    def nbytes(self) -> int:
        """The tensor's size in the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FileRegion:
    """A tensor's place: a file and the offset of its first byte."""

    path: Path
    start: int
    entry: Entry


def split_by_size(entries: Iterable[Entry], most: int) -> list[list[Entry]]:
    """Split tensors, in order, into files of at most `most` bytes; a larger tensor gets its own file."""
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
    if wrong := next((entry for entry in entries if entry.dtype not in NAMES), None):
        raise UserError(f"{wrong.name} is of {wrong.dtype}, which cannot be saved: use another dtype")


def file_regions(path: Path, entries: Sequence[Entry]) -> tuple[bytes, list[FileRegion]]:
    """Return the header of the file `path` and the place of each tensor.

    Raises UserError for a dtype that safetensors cannot store.
    """
    require_storable(entries)
    # Wider dtypes first, which aligns each tensor to its dtype.
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in ordered:
        offsets = [at, at + entry.nbytes]
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # As safetensors itself does, so that tensors begin at a multiple of 8 bytes, and can be mapped as they are.
    text += b" " * (-len(text) % 8)
    starts = {name: 8 + len(text) + item["data_offsets"][0] for name, item in header.items() if "shape" in item}
    regions = [FileRegion(path=path, start=starts[entry.name], entry=entry) for entry in ordered]
    return len(text).to_bytes(8, "little") + text, regions


def file_size(header: bytes, regions: Sequence[FileRegion]) -> int:
    """Return the size in bytes of a file with this header and these tensors."""
    return len(header) + sum(region.entry.nbytes for region in regions)


def create(path: Path, header: bytes, regions: Sequence[FileRegion]) -> None:
    """Create the file at full size with its header. Raises UserError if the disk is full or not writable."""
    size = file_size(header, regions)
    try:
        # Path.open takes no opener.
        with open(path, "wb", opener=open_no_link) as file:
            file.write(header)
            file.truncate(size)
            # So that a full disk is found here, once, and not on each rank later.
            reserve(file.fileno(), size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UserError(f"{path}: {size:,} bytes cannot be written: {reason(error, path.parent)}") from error


def reserve(descriptor: int, size: int) -> None:
    """Reserve the blocks of a file if the file system can. Raises OSError if there is not enough room.

    Without a reservation, a full disk shows when ranks write.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Not `posix_fallocate`: on a file system that cannot reserve blocks (NFS before 4.2, CephFS, Lustre on ZFS, ramfs,
    # many FUSE ones) glibc reads and writes each block instead, which fails on a file opened only for writing.
    fallocate = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    # Linux alone has it.
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
    """Return whether a file is on NFS, by Linux's mount table."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    split = ((line.split(), line.partition(" - ")[2].split()) for line in mounts)
    return any(kind[0].startswith("nfs") for fields, kind in split if kind and fields[2] == wanted)


class OpenFiles:
    """The files that a rank writes to, each opened once, only for writing."""

    def __init__(self, *, several_hosts: bool) -> None:
        self._several_hosts = several_hosts
        self._descriptors: dict[Path, int] = {}
        self._shared: set[int] = set()  # descriptors of NFS files written by several hosts

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            # `sync` reports failed writes.
            with suppress(OSError):
                os.close(descriptor)

    def write(self, region: FileRegion, start: Sequence[int], values: Tensor) -> None:
        """Write `values` to the box of the same shape, with first index `start`, of the tensor at `region`.

        Raises UserError if that fails, for example on a full disk.
        """
        if values.numel() == 0:
            return
        try:
            if region.path not in self._descriptors:
                # An NFS client that has read a page and writes a part of it sends the whole page to the server, with
                # outdated bytes of other hosts. So a file that several hosts write is not opened for reading, and each
                # write goes to the server at once, which transfers only the written bytes.
                at_once = self._several_hosts and _is_on_nfs(region.path)
                flags = os.O_WRONLY | (os.O_DSYNC if at_once else 0)
                self._descriptors[region.path] = open_no_link(region.path, flags)
                self._shared |= {self._descriptors[region.path]} if at_once else set()
            self._write(self._descriptors[region.path], region, tuple(start), values)
        except OSError as error:
            raise UserError(f"{region.path}: cannot be written: {error.strerror}") from error

    def sync(self) -> None:
        """Wait until all writes are on disk. Raises UserError if that fails."""
        for path, descriptor in self._descriptors.items():
            try:
                os.fsync(descriptor)
                # Drop the cached pages: otherwise reads on this host would miss the bytes that other hosts wrote to
                # them.
                if descriptor in self._shared:
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
        shape = region.entry.shape
        size = region.entry.dtype.itemsize
        block = values.detach().to("cpu", region.entry.dtype).contiguous()
        # After dimension `inner` the box spans the whole tensor, so these values are contiguous in the file.
        inner = next((dim for dim in reversed(range(len(shape))) if block.shape[dim] != shape[dim]), 0)
        runs = block.view(prod(block.shape[:inner]), -1)
        strides = [prod(shape[dim + 1 :]) * size for dim in range(len(shape))]
        at = offset = region.start + sum(first * stride for first, stride in zip(start, strides, strict=True))
        for index, run in zip(product(*map(range, block.shape[:inner])), runs, strict=True):
            offset = at + sum(each * stride for each, stride in zip(index, strides, strict=False))
            # As bytes, because numpy has no bfloat16. A call may write fewer of them than it was given.
            left = memoryview(run.view(torch.uint8).numpy())
            while left:
                left = left[os.pwrite(descriptor, left, offset + run.nbytes - len(left)) :]
        if block.nbytes >= SOON_BYTES and hasattr(os, "posix_fadvise"):
            # DONTNEED makes Linux start writing these pages to the disk, without waiting for them.
            os.posix_fadvise(descriptor, at, offset + runs[-1].nbytes - at, os.POSIX_FADV_DONTNEED)


def index_content(files: Mapping[str, Sequence[Entry]]) -> JsonObject:
    """Return the content of HuggingFace's index file: tensor -> file, and the total size in bytes."""
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    count = sum(prod(entry.shape) for entries in files.values() for entry in entries if entry.trained)
    weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
    return {"metadata": {"total_parameters": count, "total_size": total}, "weight_map": weight_map}
