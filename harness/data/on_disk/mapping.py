"""Arrays in files, read where they lie: however many, they keep no file open."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", bound=np.generic)


def mapped(
    path: Path, dtype: type[Number] | np.dtype[Number], offset: int = 0, count: int | None = None
) -> npt.NDArray[Number]:
    """Map `count` numbers of a file from the byte `offset` on, by default all; the array cannot be written to.

    numpy's own mapping keeps a file descriptor for each file, and a process may often have no more than 1,024.
    """
    import pyarrow as pa

    size = path.stat().st_size
    whole = np.dtype(dtype)
    if count is None:
        count = (size - offset) // whole.itemsize
    if not count:
        return np.empty(0, whole)
    with pa.memory_map(str(path)) as file:
        return np.frombuffer(file.read_buffer(), whole, count, offset)
