"""Megatron's token files: a .bin with the ids, and an .idx with their type and where documents begin."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from harness.data.formats.token_format import TokenFile, TokenFormat, mapped_ids
from harness.data.on_disk.shards import mapped
from harness.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents
_DTYPES: Mapping[int, type[np.integer]] = MappingProxyType(
    {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
)

_CHECKED_AT_ONCE = 1 << 20  # sequences


class MegatronFormat(TokenFormat):
    """A pair of files."""

    suffix = ".bin"
    index_suffix = ".idx"

    def open(self, path: Path, vocabulary: int) -> TokenFile:  # noqa: ARG002
        """Map a pair, whose header gives the type of the ids."""
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
            raise UserError(
                f"{index} has the dtype code {code}, which is not an integer type: give a file of token ids"
            )
        beyond = index.stat().st_size - HEADER.size - 12 * sequences - 8 * documents
        if beyond not in (0, sequences):  # a multimodal index ends with one byte a sequence, its mode
            raise UserError(
                f"{index} is {'cut off' if beyond < 0 else 'damaged'}: it is not of the size of {sequences:,} "
                f"sequences and {documents:,} documents"
            )
        # After the header: lengths (int32 a sequence), first bytes (int64 a sequence), then ends of documents (int64).
        lengths = mapped(index, np.int32, HEADER.size, sequences)
        at = HEADER.size + 4 * sequences
        pointers = mapped(index, np.int64, at, sequences)
        ends = mapped(index, np.int64, at + 8 * sequences, documents)
        ids = mapped_ids(path, np.dtype(_DTYPES[code]))
        said = int(pointers[-1]) // ids.itemsize + int(lengths[-1]) if sequences else 0
        if said != len(ids):
            raise UserError(
                f"{path} has {len(ids):,} tokens, but {index.name} says otherwise: the two files do not belong together"
            )
        _require_in_order(index, lengths, pointers, ends, ids.itemsize)
        return TokenFile(path, ids, pointers[ends[ends < sequences]] // ids.itemsize)


FORMAT = MegatronFormat()


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
