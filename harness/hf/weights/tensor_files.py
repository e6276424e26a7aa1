"""The tensors in a model directory's files, as lazy tensors by name.

Opening a safetensors file reads only its header. Bytes are read directly into the tensor to be filled if that is
contiguous. For a tensor that is cut along its rows (a row-parallel weight), a few MB of the file are mapped at a time
and the columns are copied out. So the disk is read in large pieces, once for all ranks of a host, and no page of a file
counts as this process's memory for long.

A `pytorch_model.bin` is opened by torch.load with weights_only, and mmap unless it is older than torch 1.6.
"""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
import zlib
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness.config.model.files import INDEX, OLD_INDEX, OLD_SINGLE, SINGLE, indexed_files
from harness.config.values.json_file import parse_json
from harness.errors import UserError, headline, printable
from harness.hf.weights.lazy_tensor import Box, InMemory, LazyTensor
from harness.parallel.host import staging

# Most bytes that are mapped at once, or read into temporary memory.
BLOCK_BYTES = 4 << 20
TOO_SHORT = "ends too early: was it changed while being read?"
# If parts of rows are read, gaps up to this size are read too: the kernel reads whole pages anyway.
GAP_BYTES = 4 << 10
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}

# First bytes of files: a Git LFS pointer, and torch's formats since and before 1.6.
POINTER = b"version "
ZIP = b"PK\x03\x04"
PICKLE = b"\x80\x02"

SAMPLES = 64  # blocks of a file that hosts compare
SAMPLE_BYTES = 4 << 10

# In bytes: the format's own limit, so that no file makes a reader parse gigabytes.
LONGEST_HEADER = 100_000_000


class OpenFile:
    """A file open for reading, closed with the last tensor that refers to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Without a buffer: values are read where they belong.
        self._file = FileIO(path)
        self.size = os.fstat(self._file.fileno()).st_size
        weakref.finalize(self, self._file.close)

    def bytes(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`. Raises ValueError if the file is shorter."""
        self._file.seek(start)
        content = self._file.read(length)
        if len(content) != length:
            raise ValueError(f"ends before byte {start + length}")
        return content

    def fetch(self, start: int, stop: int) -> None:
        """Request read-ahead of these bytes."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)

    def read_into(self, into: Tensor, start: int) -> None:
        """Fill a contiguous host tensor with the bytes from `start`."""
        self._fill(_bytes_of(into), start)

    def read_runs(self, into: Tensor, start: int, step: int) -> None:
        """Fill row i of a contiguous host tensor [rows, ...] with the bytes from `start + i * step` on.

        The file is mapped from the first to the last of these bytes: the kernel fetches it in large pieces for any
        number of rows, and caches it for the other processes of this host. Raises UserError if the file cannot be read
        or is too short.
        """
        rows = len(into)
        size = into[0].nbytes
        page = start - start % mmap.ALLOCATIONGRANULARITY
        length = start - page + (rows - 1) * step + size
        descriptor = self._file.fileno()
        # Reading a mapping beyond the end of its file would kill the process (SIGBUS).
        if page + length > os.fstat(descriptor).st_size:
            raise UserError(f"{self.path}: {TOO_SHORT}")
        # This range, and the next one while this one is copied.
        self.fetch(page, page + 2 * length)
        try:
            mapped = mmap.mmap(descriptor, length, access=mmap.ACCESS_READ, offset=page)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from error
        runs = np.ndarray((rows, size), np.uint8, mapped, start - page, (step, 1))
        np.copyto(np.asarray(_bytes_of(into)).reshape(rows, size), runs)

    def _fill(self, rest: memoryview, start: int) -> None:
        # Linux reads at most 2 GiB at a time.
        while rest:
            try:
                count = os.preadv(self._file.fileno(), [rest], start)
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read: {error.strerror}") from error
            if not count:
                raise UserError(f"{self.path}: {TOO_SHORT}")
            rest, start = rest[count:], start + count


def _bytes_of(tensor: Tensor) -> memoryview:
    # One dimension, as torch cannot view a scalar as bytes; bytes, as numpy knows no bfloat16.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a safetensors file, starting at byte `start`."""

    file: OpenFile
    name: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def position(self) -> tuple[str, int]:
        """File and offset, by which tensors are sorted to be read in order."""
        return str(self.file.path), self.start

    def fetch(self, box: Box) -> None:
        """Request read-ahead of the bytes from the first to the last value of `box`."""
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        last = sum((stop - 1) * stride for (_, stop), stride in zip(box, strides, strict=True))
        size = self.dtype.itemsize
        self.file.fetch(self.start + first * size, self.start + (last + 1) * size)

    def read(self, into: Tensor, box: Box) -> None:
        """Read the values in `box` into `into`, of its sizes; a few more bytes of each row may be read."""
        if into.numel():
            self._read(into, box, 0, 0)

    def _read(self, into: Tensor, box: Box, dim: int, at: int) -> None:
        """Read `box` from dimension `dim` on into `into`, which has only these dimensions, starting at element `at`."""
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
        size = self.dtype.itemsize
        before = span[0] * into[0, :1].numel()
        wanted = into[0].numel()
        if wanted * size >= BLOCK_BYTES:
            for index, part in enumerate(into):
                self._run(part, at + index * step + before)
            return
        # With short gaps, one read does for all rows.
        apart = (step - wanted) * size > GAP_BYTES
        rows = max(BLOCK_BYTES // (step * size), 1)
        for first in range(0, len(into), rows):
            part = into[first : first + rows]
            start = self.start + (at + first * step) * size
            if apart:
                block = part if self._fits(part) else staging(part.shape, self.dtype, part.device)
                self.file.read_runs(block, start + before * size, step * size)
            else:
                shape = (len(part), step // into[0, :1].numel(), *part.shape[2:])
                block = staging(shape, self.dtype, part.device)
                self.file.read_into(block, start)
                block = block[:, slice(*span)]
            if block is not part:
                part.copy_(block, non_blocking=True)

    def _fits(self, into: Tensor) -> bool:
        """Return whether bytes can be read directly into `into`."""
        return into.device.type == "cpu" and into.dtype == self.dtype and into.is_contiguous()

    def _run(self, into: Tensor, at: int) -> None:
        """Fill `into` with consecutive elements, starting at element `at`."""
        if self._fits(into):
            self.file.read_into(into, self.start + at * self.dtype.itemsize)
        elif into.numel() * self.dtype.itemsize <= BLOCK_BYTES:
            block = staging(into.shape, self.dtype, into.device)
            self.file.read_into(block, self.start + at * self.dtype.itemsize)
            into.copy_(block, non_blocking=True)
        else:
            row = into[0].numel()
            rows = max(BLOCK_BYTES // (row * self.dtype.itemsize), 1)
            for start in range(0, len(into), rows):
                part = into[start : start + rows]
                self._run(part if rows > 1 else part[0], at + start * row)


@dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """The tensors in the files of a directory.

    Attributes:
        tensors: by the name in the file, file by file.
        files: file name -> names of its tensors.
        sizes: file name -> bytes of its tensors.
        indexed: whether HuggingFace finds the files by their names: a lone `model.safetensors`, or by an index.
    """

    tensors: dict[str, LazyTensor]
    files: dict[str, list[str]]
    sizes: dict[str, int]
    indexed: bool


def weight_files(directory: Path) -> list[str]:
    """Return the names of the weight files of `directory` that HuggingFace would open."""
    if (directory / SINGLE).is_file():
        return [SINGLE]
    if (directory / INDEX).is_file():
        return _indexed_files(directory / INDEX)
    if found := sorted(path.name for path in directory.glob("*.safetensors")):
        return found
    return [OLD_SINGLE] if (directory / OLD_SINGLE).is_file() else _indexed_files(directory / OLD_INDEX)


def sampled(directory: Path) -> dict[str, tuple[int, int]]:
    """Return file name -> size and CRC-32 of sampled blocks."""
    # Samples, as reading a whole model takes minutes; the first and the last bytes are among them.
    found = {}
    for name in weight_files(directory):
        file = OpenFile(directory / name)
        crc = 0
        last = max(file.size - SAMPLE_BYTES, 0)
        for number in range(SAMPLES):
            crc = zlib.crc32(file.bytes(last * number // (SAMPLES - 1), min(SAMPLE_BYTES, file.size)), crc)
        found[name] = file.size, crc
    return found


def open_tensors(directory: Path) -> StoredTensors:
    """Open all weight files of `directory` that HuggingFace would open.

    Raises UserError for a file that cannot be read.
    """
    names = weight_files(directory)
    opened = {name: open_weights_file(directory / name) for name in names}
    return StoredTensors(
        tensors={name: tensor for tensors in opened.values() for name, tensor in tensors.items()},
        files={file: list(tensors) for file, tensors in opened.items()},
        sizes={file: sum(t.nbytes for t in tensors.values()) for file, tensors in opened.items()},
        indexed=any((directory / name).is_file() for name in (SINGLE, INDEX)) and names[0].endswith(".safetensors"),
    )


def _indexed_files(index: Path) -> list[str]:
    try:
        return indexed_files(index)
    except (OSError, ValueError) as error:
        raise UserError(f"{index}: cannot be read: {error}") from error


def open_weights_file(path: Path) -> dict[str, LazyTensor]:
    """Return name -> tensor (any shape) of one file of weights. Raises UserError if it cannot be read."""
    try:
        if _start(path) == POINTER:
            raise ValueError("it is a Git LFS pointer: fetch the file with `git lfs pull`")
        return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickled(path)
    # Its text would repeat the path.
    except OSError as error:
        raise UserError(f"{path}: its tensors cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path}: its tensors cannot be read: {error}") from error


def _start(path: Path) -> bytes:
    """Return the first bytes, which show the kind of file."""
    with path.open("rb") as file:
        return file.read(8)


def _open_pickled(path: Path) -> dict[str, LazyTensor]:
    start = _start(path)
    if not start.startswith((ZIP, PICKLE)):
        raise ValueError("it is not a file saved by torch")
    # Files from before torch 1.6 can only be read whole.
    mapped = start.startswith(ZIP)
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: contains more than tensors, so it is not loaded: save it as safetensors") from error
    except Exception as error:  # torch may raise anything for a damaged file
        raise ValueError(headline(error)) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path}: is not a mapping from names to tensors: save the model as safetensors")
    return {name: LazyTensor.of(InMemory(tensor, name)) for name, tensor in content.items()}


def _open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Read the header: 8 bytes of length, then JSON; the tensors' bytes follow one after the other."""
    file = OpenFile(path)
    length = int.from_bytes(file.bytes(0, 8), "little")
    if length > min(file.size - 8, LONGEST_HEADER):
        raise ValueError(f"its header claims {length:,} bytes")
    header = parse_json(file.bytes(8, length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    stored = [_stored(file, 8 + length, name, entry) for name, entry in header.items()]
    # By size too, as an empty tensor may begin where another one does.
    stored.sort(key=lambda tensor: (tensor.start, prod(tensor.shape)))
    tensors = {tensor.name: LazyTensor.of(tensor) for tensor in stored}
    ends = [tensor.start + tensors[tensor.name].nbytes for tensor in stored]
    if [8 + length, *ends] != [*(tensor.start for tensor in stored), file.size]:
        raise ValueError("its tensors overlap, or leave bytes of the file out")
    return tensors


def _stored(file: OpenFile, first: int, name: str, entry: object) -> Stored:
    """Return the tensor of a header entry; tensors begin at byte `first` of the file."""
    match entry:
        case {"dtype": str(code), "shape": [*sizes], "data_offsets": [start, stop]} if all(
            type(size) is int and size >= 0 for size in (*sizes, start, stop)
        ):
            shape = tuple(sizes)
        case _:
            raise ValueError(f"the entry of {printable(name)} lacks a valid dtype, shape or data_offsets")
    if code not in DTYPES:
        raise UserError(f"{file.path}: {name} has dtype {code}, which cannot be trained: dequantize the weights first")
    dtype = DTYPES[code]
    if stop - start != prod(shape) * dtype.itemsize or first + stop > file.size:
        raise ValueError(f"{printable(name)} of shape {shape} does not match its data_offsets: is the file truncated?")
    return Stored(file, name, first + start, shape, dtype)
