"""Two helpers for ZeRO-3: a rank's partition of each tensor, and copies of inputs that modules change in place.

ZeRO-3 gives each data-parallel rank an equal number of consecutive elements of a tensor.

ZeRO-3 also registers a backward hook on every module, which turns the module's inputs into views. torch forbids
changing such a view in place, as router jitter does with the router's input. So modules receive copies.
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
"""The graph node that a backward hook inserts before a module."""


def copy_hooked_inputs(model: nn.Module) -> None:
    """Make every module inside `model` run on copies of the inputs that a backward hook has turned into views."""
    for module in model.modules():
        # torch's own modules, most of a model, do not change their inputs.
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
    """Part `index` of `count` equal parts of a tensor's elements; the last parts may be shorter, or empty."""

    index: int
    count: int

    def boxes(self, shape: Sequence[int]) -> Iterator[Index]:
        """Yield indices of boxes that together make up this partition of a tensor of `shape`."""
        total = prod(shape)
        # ZeRO-3 rounds up, so the last parts are shorter.
        size = -(-total // self.count)
        return boxes_of_run(shape, min(self.index * size, total), min((self.index + 1) * size, total))


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Index]:
    """Yield indices of boxes that together make up the flattened elements `start` to `stop` - 1.

    These are the end of a row, whole rows, and the start of a row, and recursively the same within a partial row.
    """
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
