"""Read a checkpoint's files without running code that somebody may have put into them.

DeepSpeed unpickles whatever it finds. Here its reader takes tensors, plain values and the few classes of its own that
it stores; anything else is refused before it is called.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from harness.deepspeed.checkpoint_files import STORED_CLASSES, is_universal, reading_with
from harness.errors import UserError


def read_values(path: str | Path, map_location: Any = None) -> Any:
    """Return what torch has saved in `path`; UserError if it holds anything but tensors and plain values."""
    try:
        with torch.serialization.safe_globals(STORED_CLASSES):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} is damaged or contains more than tensors and plain values: not loaded, because it could run code"
        ) from error


@contextmanager
def values_only(engine: DeepSpeedEngine) -> Iterator[None]:
    """Have `engine` read checkpoint files by `read_values` meanwhile; UserError for a universal checkpoint.

    DeepSpeed reads the files of a universal checkpoint elsewhere, and unpickles all of them.
    """
    if is_universal(engine):
        raise UserError("checkpoint.load_universal: its files can run code when they are read: remove it")
    with reading_with(engine, read_values):
        yield
