"""Datatrove's token files, as nanotron reads them: a .ds of ids, perhaps with .ds.metadata and .ds.index beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.data.formats.token_format import TokenFile, TokenFormat, mapped_ids
from harness.errors import UserError


class DatatroveFormat(TokenFormat):
    """One file of ids."""

    suffix = ".ds"

    def open(self, path: Path, vocabulary: int) -> TokenFile:
        """Map a file; without .metadata and .index as nanotron does: 2 bytes a token up to 65,536 ids, else 4."""
        metadata = Path(f"{path}.metadata")
        index = Path(f"{path}.index")
        ends = np.fromfile(index, np.uint64).astype(np.int64) if index.is_file() else np.empty(0, np.int64)
        # Bytes of a token: from .metadata if present, else from file size and last document's end, else a guess.
        size = 2 if vocabulary <= 2**16 else 4
        last = int(ends[-1]) if len(ends) else 0
        if last and path.stat().st_size in (2 * last, 4 * last):
            size = path.stat().st_size // last
        if metadata.is_file():
            first = metadata.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
            size = {"2": 2, "4": 4}.get(first.rpartition("|")[2].strip(), size)
        ids = mapped_ids(path, np.dtype(np.uint16 if size == 2 else np.uint32))
        if len(ends) and int(ends[-1]) != len(ids):
            raise UserError(f"{path} has {len(ids):,} tokens of {size} bytes, {index.name} says {int(ends[-1]):,}")
        if len(ends) and (ends[0] < 0 or bool((np.diff(ends) < 0).any())):
            raise UserError(f"{index} is damaged: its documents do not end one after the other")
        return TokenFile(path, ids, np.concatenate([[0], ends[:-1]]).astype(np.int64) if len(ends) else ends)


FORMAT = DatatroveFormat()
