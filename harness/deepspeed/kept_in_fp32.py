"""Keep chosen parameters in float32 in an engine that trains the others in bf16.

DeepSpeed casts all parameters of a model to one dtype. ZeRO-0 to 2 flatten each parameter group by itself, so groups
may differ in dtype. ZeRO-3 flattens all groups into one tensor and reduces all gradients in one dtype; here it gets one
tensor and one bucket for each dtype. The attribute `kept_in_fp32` marks a kept parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from torch import Tensor


def is_kept(parameter: Tensor) -> bool:
    """Return whether a parameter stays in float32."""
    return bool(getattr(parameter, "kept_in_fp32", False))


Flatten = Callable[[Sequence[Tensor]], Tensor]


def by_dtype(flatten: Flatten) -> Callable[[Sequence[Tensor]], Tensor | FlatRuns]:
    """Return a function that flattens tensors of several dtypes: `flatten` for each run of equal dtype."""

    def flattened(tensors: Sequence[Tensor]) -> Tensor | FlatRuns:
        # Runs of equal dtype, not one tensor per dtype: DeepSpeed addresses parameters by their offset in this order.
        runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: tensor.dtype)]
        return FlatRuns([flatten(run) for run in runs]) if len(runs) > 1 else flatten(tensors)

    return flattened


class FlatRuns:
    """Flat tensors of different dtypes that stand for one flat tensor; `narrow` is all that DeepSpeed calls on it."""

    def __init__(self, runs: Sequence[Tensor]) -> None:
        self._runs = runs

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return `length` elements from `start`, which must lie in one of the tensors."""
        # DeepSpeed cuts out sub-groups. Each lies in one parameter group, so it has one dtype and does not reach into
        # the next run. `start` counts from the first run; convert it to an offset in the run that holds it.
        for run in self._runs:
            if start < run.numel():
                break
            start -= run.numel()
        return run.narrow(dim, start, length)
