"""What ZeRO-3 needs beside DeepSpeed: a rank's part of each tensor, and modules that change their inputs in place.

ZeRO-3 gives each data-parallel rank an equal run of a tensor's elements.

Router jitter multiplies in place what the router's module is given. ZeRO-3 gives every module a backward hook, and
torch then refuses that, as what the module is given is a view that the hook has made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_map

R = TypeVar("R")
HOOKED = "BackwardHookFunctionBackward"
"""The name of the node that a backward hook puts before a module."""


def copy_hooked_inputs(model: nn.Module) -> None:
    """Have every module below `model` run on copies of inputs that a backward hook has made views.

    torch's own modules are left out: they do not change their inputs, and they are most of a model.
    """
    for module in model.modules():
        if module is not model and not type(module).__module__.startswith("torch.nn."):
            module.forward = partial(_on_copies, module.forward)


def _on_copies(forward: Callable[..., R], *args: object, **kwargs: object) -> R:
    args, kwargs = tree_map(_copied, (args, kwargs))
    return forward(*args, **kwargs)


def _copied(value: object) -> object:
    if isinstance(value, Tensor) and type(value.grad_fn).__name__ == HOOKED:
        return value.clone()
    return value


Index = tuple[int | slice, ...]


@dataclass(frozen=True, kw_only=True)
class Zero3Partition:
    """Part `index` of `count`; the last ones may be shorter, or empty."""

    index: int
    count: int

    def boxes(self, shape: Sequence[int]) -> Iterator[Index]:
        """Return indices of boxes that together are this part of a tensor of `shape`."""
        total = prod(shape)
        size = -(-total // self.count)
        return boxes_of_run(shape, min(self.index * size, total), min((self.index + 1) * size, total))


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Index]:
    """Return indices of boxes that together are elements `start` to `stop` - 1: a row's end, whole rows, a row's
    beginning."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one row
        yield from ((last, *box) for box in boxes_of_run(shape[1:], start - last * inner, stop - last * inner))
        return
    yield from ((first - 1, *box) for box in boxes_of_run(shape[1:], start - (first - 1) * inner, inner))
    if first < last:
        yield (slice(first, last),)
    yield from ((last, *box) for box in boxes_of_run(shape[1:], 0, stop - last * inner))
