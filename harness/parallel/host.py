"""Copy between the host and an accelerator with as few synchronisations as possible.

To read a value, the host waits for all work queued on the accelerator and queues nothing meanwhile. Reading many values
at once costs one such wait. Copies from pinned memory to the device need none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

BATCH_BYTES = 64 << 20
Key = TypeVar("Key")


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move a tensor or a tuple of tensors to the device, floating-point tensors also to `dtype` if given.

    The copy comes from pinned memory, so the host does not wait and the accelerator computes meanwhile.
    """
    if not isinstance(value, Tensor):
        return tuple(map(partial(to_device, device=device, dtype=dtype), value))
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    if value.device == device or device.type == "cpu":
        return value
    # The pinned copy may be freed at once: torch's host allocator reuses its memory only after the transfer.
    return (value.pin_memory() if value.device.type == "cpu" else value).to(device, non_blocking=True)


def numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return scalars as numbers; all scalars on an accelerator are read in one copy, with one wait."""
    return reading(values)()


def reading(values: Sequence[Tensor | float]) -> Callable[[], list[float]]:
    """Queue a copy of scalars to the host; return a function that waits for it and returns numbers."""
    far: dict[int, Tensor] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and value.device.type != "cpu":
            # All scalars share one float64 tensor, in which counts up to 2**53 stay exact.
            far[index] = value.detach().double().reshape(())
    if not far:
        return partial(list, list(map(float, values)))
    near = [0.0 if index in far else float(value) for index, value in enumerate(values)]
    stacked = torch.stack(list(far.values()))
    copied = staging(stacked.shape, stacked.dtype, stacked.device)
    copied.copy_(stacked, non_blocking=True)
    # An event, because waiting for the stream would include what is queued after this call.
    arrived = torch.Event(stacked.device)
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        found = dict(zip(far, copied.tolist(), strict=True))
        return [found.get(index, value) for index, value in enumerate(near)]

    return read


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised host tensor, pinned for an accelerator so that copies need no wait."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


@torch.no_grad()
def brought_to_host(tensors: Iterable[tuple[Key, Tensor]]) -> Iterator[tuple[Key, Tensor]]:
    """Yield each key with a host copy of its tensor, in order; the host waits once per `BATCH_BYTES`.

    A tensor that is already on the host, or larger than `BATCH_BYTES`, is yielded uncopied. At most `BATCH_BYTES` plus
    one tensor are held back, so `tensors` may produce each tensor on demand.
    """
    batch: list[tuple[Key, Tensor]] = []
    size = 0
    waiting = None  # the device with copies in flight
    for key, tensor in tensors:
        is_copied = tensor.device.type != "cpu" and tensor.nbytes <= BATCH_BYTES
        if not is_copied and waiting is None:
            yield key, tensor
            continue
        if is_copied:
            waiting = tensor.device
            copy = staging(tensor.shape, tensor.dtype, tensor.device)
            copy.copy_(tensor, non_blocking=True)
            batch.append((key, copy))
        else:
            # It needs no copy, but has to wait its turn.
            batch.append((key, tensor))
        size += tensor.nbytes
        if waiting is not None and size >= BATCH_BYTES:
            torch.accelerator.current_stream(waiting).synchronize()
            yield from batch
            batch = []
            size = 0
            waiting = None
    if waiting is not None:
        torch.accelerator.current_stream(waiting).synchronize()
    yield from batch
