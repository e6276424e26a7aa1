"""Keep chosen parameters in float32 in an engine that trains the others in bf16.

DeepSpeed casts all parameters of a model to one dtype. ZeRO-0 to 2 flatten each parameter group by itself, so the
groups may differ in dtype. ZeRO-3 puts all groups into one flat tensor and reduces all gradients in one dtype; here it
gets one tensor and one bucket for each dtype. The attribute `kept_in_fp32` marks a parameter that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from torch import Tensor, nn


def is_kept(parameter: Tensor) -> bool:
    """Return whether a parameter stays in float32."""
    return bool(getattr(parameter, "kept_in_fp32", False))


@contextmanager
def spared_from_casts(module: nn.Module) -> Iterator[None]:
    """Put the values of kept parameters back at the end: DeepSpeed casts a module's parameters all at once."""
    kept = [(p, p.data) for p in module.parameters() if is_kept(p)]
    yield
    for parameter, data in kept:
        parameter.data = data


Flatten = Callable[[Sequence[Tensor]], Tensor]


def by_dtype(flatten: Flatten) -> Callable[[Sequence[Tensor]], Tensor | FlatRuns]:
    """Return a function that flattens tensors of several dtypes: each run of one dtype by `flatten`."""

    def flattened(tensors: Sequence[Tensor]) -> Tensor | FlatRuns:
        # runs of equal dtype, and not one tensor per dtype: DeepSpeed addresses parameters by their offset in this
        # order
        runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: tensor.dtype)]
        return FlatRuns([flatten(run) for run in runs]) if len(runs) > 1 else flatten(tensors)

    return flattened


class FlatRuns:
    """Flat tensors of different dtypes that stand for one flat tensor; `narrow` is all that DeepSpeed calls on it."""

    def __init__(self, runs: Sequence[Tensor]) -> None:
        self._runs = runs

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return `length` elements from `start`, which must lie in one of the tensors."""
        # DeepSpeed cuts out sub-groups. Each is of one parameter group, so of one dtype, and none reaches into the next
        # run. `start` counts from the first run; here it becomes a place in the run that is found.
        for run in self._runs:
            if start < run.numel():
                break
            start -= run.numel()
        return run.narrow(dim, start, length)
