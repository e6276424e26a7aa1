"""What a format of token files decides: its files' names, and how a file is mapped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from harness.data.on_disk.shards import mapped
from harness.errors import UserError

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


class TokenFormat(ABC):
    """A format of files of token ids.

    Attributes:
        suffix: of the file that holds the ids.
        index_suffix: of an index beside each file, if a pair may also be given as its index or its prefix.
    """

    suffix: ClassVar[str]
    index_suffix: ClassVar[str | None] = None

    @abstractmethod
    def open(self, path: Path, vocabulary: int) -> TokenFile:
        """Map a file; `vocabulary` is the number of ids of the model. UserError if it contradicts its header."""


def mapped_ids(path: Path, dtype: np.dtype[np.integer]) -> Ids:
    """Map all ids of a file [tokens]. UserError if it is cut off."""
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise UserError(f"{path} has {size:,} bytes, no multiple of the {dtype.itemsize} of a token: it is cut off")
    return mapped(path, dtype)
