"""Measure the memory of a profiled step: parameters, gradients, optimizer state, activations and the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.optim import Optimizer

from harness.deepspeed.engine import gradients_of
from harness.deepspeed.zero3_parameters import held_tensor
from harness.device.memory import EarlierPeaks, host_bytes, peak_bytes, reset_peak
from harness.parallel.memory import malloc_trim

DEPTH = 4  # levels of nested lists and dictionaries that are searched for an optimizer's tensors


@dataclass
class StepMemory:
    """Measures the memory of one step: what is held before it, the gradients, and the peak.

    On a CPU it measures the process's resident set, on an accelerator the bytes that torch's allocator has given out.
    """

    engine: DeepSpeedEngine
    device: torch.device
    earlier_peaks: EarlierPeaks
    _before: int = 0
    _held: dict[str, int] = field(default_factory=dict)
    _gradients: int = 0

    def begin(self) -> None:
        """Begin a step; free pages go back to the system first, so that the resident set holds only what is in use."""
        malloc_trim()
        self._held = held_bytes(self.engine, self.device)
        reset_peak(self.device, self.earlier_peaks)
        self._before = host_bytes() if self.device.type == "cpu" else torch.accelerator.memory_allocated(self.device)

    def note_gradients(self) -> None:
        """Measure the gradients; to be called when they are complete."""
        self._gradients = max(self._gradients, held_bytes(self.engine, self.device)["gradients"])

    def end(self) -> dict[str, int]:
        """Return the parts of the peak in bytes, which add up to `peak`."""
        found = {**self._held, "gradients": max(self._gradients, self._held["gradients"])}
        after = held_bytes(self.engine, self.device)
        found["optimizer"] = after["optimizer"]  # before the first step there were no states
        known = sum(self._held.values())
        made = sum(found.values()) - known
        peak = max(peak_bytes(self.device), self._before)
        found["other"] = max(0, self._before - known)
        found["activations"] = max(0, peak - max(self._before, known) - made)
        return {**found, "peak": sum(found.values())}


def held_bytes(engine: DeepSpeedEngine, device: torch.device) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on the device; shared storages count once."""
    seen: set[int] = set()

    def size(tensors: Iterator[Tensor]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == device.type and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    module, optimizer = engine.module, engine.optimizer
    whole = (*module.parameters(), *module.buffers())  # ZeRO-3 keeps small parameters whole, besides their parts
    parameters = size(tensor for one in whole for tensor in (held_tensor(one), one))
    gradients = size(gradient for parameter in module.parameters() for gradient in gradients_of(parameter))
    gradients += size(tensor for is_gradient, tensor in _tensors(optimizer) if is_gradient)
    rest = size(tensor for is_gradient, tensor in _tensors(optimizer) if not is_gradient)
    return {"parameters": parameters, "gradients": gradients, "optimizer": rest}


def _tensors(value: object, is_gradient: bool = False, depth: int = 0) -> Iterator[tuple[bool, Tensor]]:
    """Yield the tensors that an optimizer holds, each with whether the name of its attribute says gradient."""
    if isinstance(value, Tensor):
        yield is_gradient, value
        if value.grad is not None:
            yield True, value.grad
        return
    if depth > DEPTH:
        return
    if depth == 0 or isinstance(value, Optimizer):
        value = vars(value)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _tensors(item, is_gradient or _names_gradients(name), depth + 1)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item, is_gradient, depth + 1)


def _names_gradients(name: object) -> bool:
    """Return whether a key names gradients ("ipg" in DeepSpeed's buckets); a key that is a tensor does not."""
    return isinstance(name, str) and ("grad" in name or "ipg" in name)
