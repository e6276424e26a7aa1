"""A tensor in a safetensors file, of which any part can be read.

Bytes are read straight into the tensor that is filled wherever that is contiguous. Of a tensor that is cut along its
rows (a row-parallel weight, say) a few MB of the file are mapped at a time and the columns copied out: the disk is read
in large pieces, once for all ranks of a host, and no page of a file counts as this process's memory for long.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness.errors import UserError
from harness.hf.weights.slices import Box

BLOCK_BYTES = 4 << 20  # the most that is mapped at once, or read into other memory than its final place
TOO_SHORT = "ends too early: was it changed while being read?"
GAP_BYTES = 4 << 10  # where a part of each row is wanted, up to this between two is read too: a page or less


class OpenFile:
    """A file open for reading; closed with the last tensor that refers to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = FileIO(path)
        self.size = os.fstat(self._file.fileno()).st_size
        weakref.finalize(self, self._file.close)

    def bytes(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`; ValueError if the file ends before."""
        self._file.seek(start)
        content = self._file.read(length)
        if len(content) != length:
            raise ValueError(f"ends before byte {start + length}")
        return content

    def fetch(self, start: int, stop: int) -> None:
        """Ask the system to read these bytes from the disk, and wait for nothing."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)

    def read_into(self, into: Tensor, start: int) -> None:
        """Fill a contiguous tensor in host memory with the bytes from `start`."""
        self._fill(_bytes_of(into), start)

    def read_runs(self, into: Tensor, start: int, step: int) -> None:
        """Fill each row of such a tensor with the bytes from `start`, `start + step` and so on.

        The stretch of the file from the first to the last is mapped: the kernel fetches it in large pieces, whatever
        the number of rows, and keeps it for the other processes of this host.
        """
        rows, size = len(into), into[0].nbytes
        page = start - start % mmap.ALLOCATIONGRANULARITY
        length = start - page + (rows - 1) * step + size
        descriptor = self._file.fileno()
        if page + length > os.fstat(descriptor).st_size:  # touching what is missing would end the process
            raise UserError(f"{self.path}: {TOO_SHORT}")
        self.fetch(page, page + 2 * length)  # this stretch, and the next while this one is copied
        try:
            mapped = mmap.mmap(descriptor, length, access=mmap.ACCESS_READ, offset=page)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from error
        runs = np.ndarray((rows, size), np.uint8, mapped, start - page, (step, 1))
        np.copyto(np.asarray(_bytes_of(into)).reshape(rows, size), runs)

    def _fill(self, rest: memoryview, start: int) -> None:
        while rest:
            try:
                count = os.preadv(self._file.fileno(), [rest], start)
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read: {error.strerror}") from error
            if not count:
                raise UserError(f"{self.path}: {TOO_SHORT}")
            rest, start = rest[count:], start + count


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a safetensors file, which begins at byte `start`."""

    file: OpenFile
    name: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def position(self) -> tuple[str, int]:
        """Where it lies, to read in order."""
        return str(self.file.path), self.start

    def fetch(self, box: Box) -> None:
        """Ask the system for what stands between the first and the last value of `box`."""
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        last = sum((stop - 1) * stride for (_, stop), stride in zip(box, strides, strict=True))
        size = self.dtype.itemsize
        self.file.fetch(self.start + first * size, self.start + (last + 1) * size)

    def read(self, into: Tensor, box: Box) -> None:
        """Read what is in `box`, and at most a few more bytes of each row."""
        if into.numel():
            self._read(into, box, 0, 0)

    def _read(self, into: Tensor, box: Box, dim: int, at: int) -> None:
        """Read dimensions `dim` and on of `box` into `into`, which has only these; they begin at element `at`."""
        inner = prod(self.shape[dim + 1 :])
        whole = [span == (0, size) for span, size in zip(box[dim + 1 :], self.shape[dim + 1 :], strict=True)]
        first = box[dim][0] if dim < len(box) else 0
        if all(whole):
            self._run(into, at + first * inner)
        elif all(whole[1:]):
            self._rows(into, at + first * inner, inner, box[dim + 1])
        else:
            for index, part in enumerate(into, first):
                self._read(part, box, dim + 1, at + index * inner)

    def _rows(self, into: Tensor, at: int, step: int, span: tuple[int, int]) -> None:
        """Read `span` of each row: the first begins at element `at`, the next `step` elements later."""
        size, before = self.dtype.itemsize, span[0] * into[0, :1].numel()
        wanted = into[0].numel()
        if wanted * size >= BLOCK_BYTES:
            for index, part in enumerate(into):
                self._run(part, at + index * step + before)
            return
        apart = (step - wanted) * size > GAP_BYTES
        rows = max(BLOCK_BYTES // (step * size), 1)
        for first in range(0, len(into), rows):
            part, start = into[first : first + rows], self.start + (at + first * step) * size
            if apart:
                block = part if self._fits(part) else torch.empty(part.shape, dtype=self.dtype)
                self.file.read_runs(block, start + before * size, step * size)
            else:
                block = torch.empty((len(part), step // into[0, :1].numel(), *part.shape[2:]), dtype=self.dtype)
                self.file.read_into(block, start)
                block = block[:, slice(*span)]
            if block is not part:
                part.copy_(block)

    def _fits(self, into: Tensor) -> bool:
        """Return whether bytes can be read straight into it."""
        return into.device.type == "cpu" and into.dtype == self.dtype and into.is_contiguous()

    def _run(self, into: Tensor, at: int) -> None:
        """Read what stands without a gap from element `at` on."""
        if self._fits(into):
            self.file.read_into(into, self.start + at * self.dtype.itemsize)
        elif into.numel() * self.dtype.itemsize <= BLOCK_BYTES:
            block = torch.empty(into.shape, dtype=self.dtype)
            self.file.read_into(block, self.start + at * self.dtype.itemsize)
            into.copy_(block)
        else:
            row = into[0].numel()
            rows = max(BLOCK_BYTES // (row * self.dtype.itemsize), 1)
            for start in range(0, len(into), rows):
                part = into[start : start + rows]
                self._run(part if rows > 1 else part[0], at + start * row)
