"""What the files of a vision-language model hold besides its text decoder: training carries it along, unread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from harness.config.model.files import SINGLE
from harness.config.model.hub import cached
from harness.config.model.shape import read_model_config
from harness.planner.shape import DecoderShape

BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16}
"""Bits of an element by the dtypes of safetensors; 8 for any other."""


def carried_bytes(source: str, shape: DecoderShape) -> int:
    """Return about how many bytes of a model's safetensors are not its text decoder's; 0 for a text model.

    No rank loads them, and an export copies them. Their number is that of all elements in the files without the
    decoder's parameters, as names of tensors do not say in every family what belongs to the decoder.
    """
    if "text_config" not in read_model_config(source):
        return 0
    elements = stored = 0
    for path in sorted((cached(source) or Path(source)).glob(f"*{Path(SINGLE).suffix}")):
        for count, bits in _tensors(path):
            elements += count
            stored += count * bits // 8
    return 0 if elements <= shape.parameters else round(stored * (1 - shape.parameters / elements))


def _tensors(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the number of elements of each tensor of a file, and the bits of an element; nothing if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:  # reads the header alone
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                tensor = file.get_slice(name)
                yield math.prod(tensor.get_shape()), BITS.get(tensor.get_dtype(), 8)
    except (OSError, SafetensorError):
        return
