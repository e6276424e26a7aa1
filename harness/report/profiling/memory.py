"""What the memory of a rank holds at the peak of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.optim import Optimizer

from harness.deepspeed.engine import gradients_of
from harness.deepspeed.zero3_parameters import held_tensor
from harness.parallel.memory import malloc_trim
from harness.resilience.process.memory import host_bytes, peak_bytes, reset_peak

DEPTH = 4  # of lists and dictionaries in an optimizer


@dataclass
class StepMemory:
    """Takes the memory of one step: what was there before it, what gradients there are, and the peak.

    On a CPU it is the process's resident set, on an accelerator what the allocator has given out.
    """

    engine: DeepSpeedEngine
    device: torch.device
    _before: int = 0
    _held: dict[str, int] = field(default_factory=dict)
    _gradients: int = 0

    def begin(self) -> None:
        """Begin a step, from pages that hold something alone."""
        malloc_trim()
        self._held = held_bytes(self.engine, self.device)
        reset_peak(self.device)
        self._before = host_bytes() if self.device.type == "cpu" else torch.accelerator.memory_allocated(self.device)

    def note_gradients(self) -> None:
        """Take the gradients, when they are complete."""
        self._gradients = max(self._gradients, held_bytes(self.engine, self.device)["gradients"])

    def end(self) -> dict[str, int]:
        """Return the parts of the peak in bytes, which add up to `peak`."""
        found = {**self._held, "gradients": max(self._gradients, self._held["gradients"])}
        after = held_bytes(self.engine, self.device)
        found["optimizer"] = after["optimizer"]  # the first step makes the states
        known = sum(self._held.values())
        made = sum(found.values()) - known
        peak = max(peak_bytes(self.device), self._before)
        found["other"] = max(0, self._before - known)
        found["activations"] = max(0, peak - max(self._before, known) - made)
        return {**found, "peak": sum(found.values())}


def held_bytes(engine: DeepSpeedEngine, device: torch.device) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on the device; what is shared counts once."""
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
    whole = (*module.parameters(), *module.buffers())  # ZeRO-3 keeps small ones whole, besides their parts
    parameters = size(tensor for one in whole for tensor in (held_tensor(one), one))
    gradients = size(gradient for parameter in module.parameters() for gradient in gradients_of(parameter))
    gradients += size(tensor for is_gradient, tensor in _tensors(optimizer) if is_gradient)
    rest = size(tensor for is_gradient, tensor in _tensors(optimizer) if not is_gradient)
    return {"parameters": parameters, "gradients": gradients, "optimizer": rest}


def _tensors(value: object, is_gradient: bool = False, depth: int = 0) -> Iterator[tuple[bool, Tensor]]:
    """Yield the tensors on this rank that an optimizer holds, and whether their names say that they are gradients."""
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
    """Whether a name, which may be a tensor as well, is that of gradients; DeepSpeed calls its buckets ipg."""
    return isinstance(name, str) and ("grad" in name or "ipg" in name)
