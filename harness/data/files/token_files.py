"""Map files of token ids that other programs made: Megatron's .bin with .idx, and datatrove's .ds, as nanotron reads.

The files are used in place: nothing is tokenised or copied, and only the header is read beforehand. A Megatron pair may
be given as its .bin, its .idx or its prefix; a directory or glob may hold several files.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from harness.data.on_disk.shards import mapped
from harness.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents
_DTYPES: Mapping[int, type[np.integer]] = MappingProxyType(
    {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
)

_CHECKED_AT_ONCE = 1 << 20  # sequences

Ids = npt.NDArray[np.integer]


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped token file.

    Attributes:
        ids: [tokens].
        starts: indices of the ids at which documents begin; empty if the file has no index.
    """

    path: Path
    ids: Ids
    starts: npt.NDArray[np.int64]


def token_paths(source: str | os.PathLike[str]) -> list[Path]:
    """Return the .bin or .ds file that a path names, or nothing."""
    path = Path(source)
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
    if path.suffix in (".bin", ".ds"):
        return [path]
    pair = path.with_name(path.name + ".bin")
    return [pair] if not path.exists() and pair.is_file() else []


def open_tokens(path: Path, vocabulary: int) -> TokenFile:
    """Map a token file, and check samples of its ids against the `vocabulary` (number of ids) of the model.

    A .ds file without .metadata and .index is read as nanotron does: 2 bytes a token up to 65,536 ids, else 4.

    Raises:
        UserError: the file cannot be read, contradicts its header, or has ids that the model does not know.
    """
    file = _mapped_file(path, vocabulary)
    # Read 64 stretches of 4,096 ids: a file of terabytes would take hours. A few ids reveal a wrong dtype.
    for start in np.linspace(0, max(len(file.ids) - 4096, 0), 64).astype(np.int64):
        part = file.ids[start : start + 4096]
        if int(part.max()) >= vocabulary or int(part.min()) < 0:
            worst = int(part.min()) if int(part.min()) < 0 else int(part.max())
            raise UserError(
                f"{path} has the id {worst} near token {start:,}, but the model's ids are 0 to {vocabulary - 1}: use "
                "the model whose tokenizer made the file"
            )
    return file


def require_token_files(paths: Sequence[Path]) -> None:
    """Raise UserError for a file that is missing or has a wrong header; ids are not read."""
    for path in paths:
        _mapped_file(path, 2**16)


def _mapped_file(path: Path, vocabulary: int) -> TokenFile:
    try:
        file = _megatron(path) if path.suffix == ".bin" else _datatrove(path, vocabulary)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
    if not len(file.ids):
        raise UserError(f"{path} is empty: give tokens to train on")
    return file


def _megatron(path: Path) -> TokenFile:
    index = path.with_suffix(".idx")
    if not index.is_file():
        raise UserError(f"{path} has no {index.name} beside it: Megatron's files come in pairs")
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise UserError(f"{index} is not a Megatron index: it does not begin with MMIDIDX")
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != 1:
        raise UserError(f"{index} has version {version}: only version 1 is known")
    if code not in _DTYPES:
        raise UserError(f"{index} has the dtype code {code}, which is not an integer type: give a file of token ids")
    beyond = index.stat().st_size - HEADER.size - 12 * sequences - 8 * documents
    if beyond not in (0, sequences):  # a multimodal index ends with one byte a sequence, its mode
        raise UserError(
            f"{index} is {'cut off' if beyond < 0 else 'damaged'}: it is not of the size of {sequences:,} sequences "
            f"and {documents:,} documents"
        )
    # After the header: lengths (int32 a sequence), first bytes (int64 a sequence), then ends of documents (int64).
    lengths = mapped(index, np.int32, HEADER.size, sequences)
    at = HEADER.size + 4 * sequences
    pointers = mapped(index, np.int64, at, sequences)
    ends = mapped(index, np.int64, at + 8 * sequences, documents)
    ids = _mapped(path, np.dtype(_DTYPES[code]))
    said = int(pointers[-1]) // ids.itemsize + int(lengths[-1]) if sequences else 0
    if said != len(ids):
        raise UserError(
            f"{path} has {len(ids):,} tokens, but {index.name} says otherwise: the two files do not belong together"
        )
    _require_in_order(index, lengths, pointers, ends, ids.itemsize)
    return TokenFile(path, ids, pointers[ends[ends < sequences]] // ids.itemsize)


def _require_in_order(
    index: Path, lengths: npt.NDArray[np.int32], pointers: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], size: int
) -> None:
    """Raise UserError unless sequences follow each other without gaps and documents are in order.

    Args:
        lengths: of each sequence, in tokens.
        pointers: first byte of each sequence.
        ends: index of each document's first sequence, and the number of sequences at the end.
        size: bytes of a token.
    """
    behind = 0
    for start in range(0, len(lengths), _CHECKED_AT_ONCE):
        some = lengths[start : start + _CHECKED_AT_ONCE]
        stops = behind + np.cumsum(some, dtype=np.int64) * size
        begins = np.concatenate([[behind], stops[:-1]])
        wrong = np.flatnonzero((some < 0) | (pointers[start : start + _CHECKED_AT_ONCE] != begins))
        if len(wrong):
            raise UserError(
                f"{index} is damaged: sequence {start + int(wrong[0]):,} does not begin where the one before ends"
            )
        behind = int(stops[-1])
    # Megatron's list begins with 0, then has the number of sequences up to the end of each document.
    if not len(ends) or ends[0] or ends[-1] not in (0, len(lengths)) or bool((np.diff(ends) < 0).any()):
        raise UserError(f"{index} is damaged: its documents do not begin at sequences 0 to {len(lengths):,}, in order")


def _datatrove(path: Path, vocabulary: int) -> TokenFile:
    metadata, index = Path(f"{path}.metadata"), Path(f"{path}.index")
    ends = np.fromfile(index, np.uint64).astype(np.int64) if index.is_file() else np.empty(0, np.int64)
    # Bytes of a token: from .metadata if present, else from the file's size and the last document's end, else a guess.
    size = 2 if vocabulary <= 2**16 else 4
    last = int(ends[-1]) if len(ends) else 0
    if last and path.stat().st_size in (2 * last, 4 * last):
        size = path.stat().st_size // last
    if metadata.is_file():
        first = metadata.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        size = {"2": 2, "4": 4}.get(first.rpartition("|")[2].strip(), size)
    ids = _mapped(path, np.dtype(np.uint16 if size == 2 else np.uint32))
    if len(ends) and int(ends[-1]) != len(ids):
        raise UserError(f"{path} has {len(ids):,} tokens of {size} bytes, {index.name} says {int(ends[-1]):,}")
    if len(ends) and (ends[0] < 0 or bool((np.diff(ends) < 0).any())):
        raise UserError(f"{index} is damaged: its documents do not end one after the other")
    return TokenFile(path, ids, np.concatenate([[0], ends[:-1]]).astype(np.int64) if len(ends) else ends)


def _mapped(path: Path, dtype: np.dtype[np.integer]) -> Ids:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise UserError(f"{path} has {size:,} bytes, no multiple of the {dtype.itemsize} of a token: it is cut off")
    return mapped(path, dtype)
