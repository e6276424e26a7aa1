"""The tensors in a model directory's files, as lazy tensors by name.

A safetensors file is opened by its header, and read where tensors are asked for (`stored_tensor.py`). A
`pytorch_model.bin` is opened with torch.load's weights_only, and mmap unless it is older than torch 1.6. Each file is
opened once.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.config.values.json_file import parse_json, read_json
from harness.errors import UserError, printable
from harness.hf.weights.lazy_tensor import InMemory, LazyTensor
from harness.hf.weights.stored_tensor import OpenFile, Stored

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_SINGLE, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

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

# how files begin: a pointer of Git LFS, and what torch saves now and saved before 1.6
POINTER, ZIP, PICKLE = b"version ", b"PK\x03\x04", b"\x80\x02"

LONGEST_HEADER = 100_000_000  # as the format has it, so that no file makes a reader parse gigabytes


@dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """What the files of a directory hold.

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


def has_tensors(directory: Path) -> bool:
    """Whether there are weights in `directory`, or an index of some, in a form that `open_tensors` looks for."""
    named = (INDEX, OLD_SINGLE, OLD_INDEX)
    return any(directory.glob("*.safetensors")) or any((directory / name).is_file() for name in named)


def open_tensors(directory: Path) -> StoredTensors:
    """Open all weight files of `directory`, as HuggingFace chooses them; UserError for one that cannot be read."""
    indexed = True
    if (directory / SINGLE).is_file():
        names = [SINGLE]
    elif (directory / INDEX).is_file():
        names = _indexed_files(directory / INDEX)
    elif any(directory.glob("*.safetensors")):
        names, indexed = sorted(path.name for path in directory.glob("*.safetensors")), False
    elif (directory / OLD_SINGLE).is_file():
        names = [OLD_SINGLE]
    else:
        names = _indexed_files(directory / OLD_INDEX)
    opened = {name: _open(directory / name) for name in names}
    return StoredTensors(
        tensors={name: tensor for tensors in opened.values() for name, tensor in tensors.items()},
        files={file: list(tensors) for file, tensors in opened.items()},
        sizes={file: sum(t.nbytes for t in tensors.values()) for file, tensors in opened.items()},
        indexed=indexed and names[0].endswith(".safetensors"),
    )


def _indexed_files(index: Path) -> list[str]:
    try:
        files = set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index}: cannot be read: {type(error).__name__}: {error}") from error
    outside = [name for name in files if not isinstance(name, str) or Path(name).name != name]
    if outside or not files:
        raise UserError(f"{index}: must list files of its own directory, but lists {outside[:1] or 'none'}")
    return sorted(files)


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Open one safetensors file; UserError if it cannot be read."""
    return _open(path)


def _open(path: Path) -> dict[str, LazyTensor]:
    try:
        if _start(path) == POINTER:
            raise ValueError("it is a Git LFS pointer: fetch the file with `git lfs pull`")
        return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickled(path)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, OSError) and error.strerror:  # without the path once more
            reason = error.strerror
        raise UserError(f"{path}: its tensors cannot be read: {reason}") from error


def _start(path: Path) -> bytes:
    """Return the first bytes, which show what kind of file it is."""
    with path.open("rb") as file:
        return file.read(8)


def _open_pickled(path: Path) -> dict[str, LazyTensor]:
    start = _start(path)
    if not start.startswith((ZIP, PICKLE)):
        raise ValueError("it is not a file saved by torch")
    mapped = start.startswith(ZIP)  # what torch saved before 1.6 can only be read whole
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: contains more than tensors, so it is not loaded: save it as safetensors") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path}: is not a mapping from names to tensors: save the model as safetensors")
    return {name: LazyTensor.of(InMemory(tensor, name)) for name, tensor in content.items()}


def _open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Read the header: 8 bytes that give its length, JSON, then the tensors' bytes one after the other."""
    file = OpenFile(path)
    length = int.from_bytes(file.bytes(0, 8), "little")
    if length > min(file.size - 8, LONGEST_HEADER):
        raise ValueError(f"its header claims {length:,} bytes")
    header = parse_json(file.bytes(8, length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    stored = [_stored(file, 8 + length, name, entry) for name, entry in header.items()]
    stored.sort(key=lambda tensor: (tensor.start, prod(tensor.shape)))  # an empty tensor may begin where another does
    tensors = {tensor.name: LazyTensor.of(tensor) for tensor in stored}
    ends = [tensor.start + tensors[tensor.name].nbytes for tensor in stored]
    if [8 + length, *ends] != [*(tensor.start for tensor in stored), file.size]:
        raise ValueError("its tensors overlap, or leave bytes of the file out")
    return tensors


def _stored(file: OpenFile, first: int, name: str, entry: Any) -> Stored:
    """Return the tensor that an entry of the header describes; tensors begin at byte `first` of the file."""
    try:
        code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        is_sound = type(code) is str and all(type(size) is int and size >= 0 for size in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"the entry of {printable(name)} lacks a valid dtype, shape or data_offsets")
    if code not in DTYPES:
        raise UserError(f"{file.path}: {name} has dtype {code}, which cannot be trained: dequantize the weights first")
    dtype = DTYPES[code]
    if stop - start != prod(shape) * dtype.itemsize or first + stop > file.size:
        raise ValueError(f"{printable(name)} of shape {shape} does not match its data_offsets: is the file truncated?")
    return Stored(file, name, first + start, shape, dtype)
