"""How a tuple of tensors crosses from one pipeline stage to the next.

DeepSpeed's pipeline returns gradients for the first tensor of a tuple and, with tensor parallelism, refuses any
further tensor that needs one. So all floating tensors of a tuple travel as one flat tensor, followed by a list of
shapes that says how to take it apart, followed by the tensors of integers. A bare tensor, and a tuple with nothing
but int64 after a first tensor of two dimensions or more, travel as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.parallel.values import Value

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
END = -1
Layout = tuple[tuple[int, tuple[int, ...]], ...]
"""For each tensor of a tuple the place of its dtype in `DTYPES`, and its shape."""


def pack_payload(value: Value) -> Value:
    """Return the form in which a layer's output is sent."""
    if isinstance(value, Tensor) or _travels_as_it_is(value):
        return value
    floats = [tensor for tensor in value if tensor.is_floating_point()]
    kind = floats[0].dtype
    for tensor in floats[1:]:
        kind = torch.promote_types(kind, tensor.dtype)
    flat = torch.cat([tensor.reshape(-1).to(kind) for tensor in floats])
    numbers = [n for tensor in value for n in (DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape)]
    numbers += [END] * sum(value[0].shape[:1])  # by the length of the list, other rows are another form
    shapes = torch.tensor(numbers, dtype=torch.int64, device=flat.device)
    return flat, shapes, *(tensor.long() for tensor in value if not tensor.is_floating_point())


class Unpacker:
    """Takes apart what `pack_payload` put together. The shapes are read once for each form of what arrives: reading
    them waits for the device."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[tuple[int, ...], ...], Layout] = {}

    def __call__(self, value: Value) -> Value:
        """Return the layer's output as it was before it was sent."""
        if isinstance(value, Tensor) or value[0].dim() > 1:
            return value
        flat, shapes, *integers = value
        key = tuple(tuple(tensor.shape) for tensor in value)
        if key not in self._layouts:
            self._layouts[key] = _read(shapes.tolist())
        layout = self._layouts[key]
        sizes = [torch.Size(shape).numel() for kind, shape in layout if DTYPES[kind].is_floating_point]
        floats, rest = iter(flat.split(sizes)), iter(integers)
        return tuple(
            next(floats).view(shape).to(DTYPES[kind]) if DTYPES[kind].is_floating_point else next(rest).to(DTYPES[kind])
            for kind, shape in layout
        )


def _travels_as_it_is(value: tuple[Tensor, ...]) -> bool:
    return value[0].dim() > 1 and all(tensor.dtype == torch.int64 for tensor in value[1:])


def _read(numbers: list[int]) -> Layout:
    layout = []
    while numbers and numbers[0] != END:
        kind, dim, *rest = numbers
        layout.append((kind, tuple(rest[:dim])))
        numbers = rest[dim:]
    return tuple(layout)
