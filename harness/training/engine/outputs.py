"""Collect a model's outputs in an evaluation, for metrics or for greedy generation.

DeepSpeed's engines do not return outputs: the last stage turns them into a loss. So the loss's `observer` collects the
outputs that the loss receives.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from harness.batches.collate import IGNORED
from harness.errors import UserError
from harness.resilience.process.activity import inside
from harness.topology.agreement import all_gather_object, host_group
from harness.training.engine.engine import Engine
from harness.training.engine.losses import Labels, Outputs, Targets

Preprocess: TypeAlias = Callable[[Outputs, Labels], Outputs]
"""HuggingFace's `preprocess_logits_for_metrics`: maps logits and labels to the values to keep."""
Array: TypeAlias = npt.NDArray[np.generic]
Arrays: TypeAlias = Array | tuple[Array, ...]
"""Outputs or labels on the CPU."""


class KeptOutputs:
    """A context that collects an engine's outputs and labels; all ranks enter it.

    Args:
        preprocess: maps outputs and labels of a micro-batch to the values to keep instead of the outputs.
        everywhere: whether all ranks receive the outputs, or only rank 0.
        labels: whether to collect labels too.
    """

    def __init__(
        self, engine: Engine, preprocess: Preprocess | None = None, *, everywhere: bool = False, labels: bool = True
    ) -> None:
        self._engine = engine
        self._preprocess = preprocess
        self._everywhere = everywhere
        self._labels = labels
        self._fresh: list[tuple[Arrays, Arrays]] = []
        self._gathered: list[tuple[Arrays, Arrays]] = []

    def __enter__(self) -> Self:
        self._engine.loss.observer = self._keep
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.loss.observer = None

    @inside("preprocess_logits_for_metrics")
    def _keep(self, outputs: Outputs, targets: Targets) -> None:
        outputs = self._engine.loss.loss.kept(outputs, targets)
        # `kept` has gathered the logits over tensor-parallel and context ranks: one copy is enough.
        if self._engine.groups.coordinate.tp_rank > 0 or self._engine.groups.coordinate.cp_rank > 0:
            return
        _, rows, _, _, *several = targets
        labels = several[0] if len(several) == 1 else tuple(several)
        if not self._labels:
            labels = ()
        if self._preprocess is not None:
            outputs = self._preprocess(outputs, labels)
        count = int(rows)
        self._fresh.append(tree_map(lambda value: _as_array(value, count), (outputs, labels)))

    def gather(self) -> None:
        """Gather the outputs kept since the last call; all ranks call it, each after as many micro-batches."""
        groups = self._engine.groups
        fresh = self._fresh
        self._fresh = []
        if self._everywhere or groups.layout.world_size == 1:
            parts = all_gather_object(fresh)
        else:
            parts = [[]] * groups.layout.world_size
            # To rank 0 alone, as only rank 0 computes metrics: an all-gather would send all logits to every rank.
            dist.gather_object(fresh, parts if groups.rank == 0 else None, dst=0, group=host_group())
        ranks = [
            groups.layout.rank(stage=groups.loss_stage, dp_rank=first, tp_rank=0)
            for first in range(0, groups.layout.dp_size, groups.layout.cp_size)
        ]
        # Batch rank k % batch_ranks has evaluated micro-batch k: interleaving restores the order of the data set.
        for step in zip(*(parts[rank] for rank in ranks), strict=True):
            self._gathered += step

    def joined(self) -> tuple[Outputs, Labels]:
        """Return outputs and labels of all samples [samples, ...]; shorter micro-batches are padded with -100."""
        if not self._gathered:
            return None, None
        joined: tuple[Arrays, Arrays] = tree_map(lambda *arrays: _join(arrays), *self._gathered)
        return joined


def _as_array(value: object, rows: int) -> Array:
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise UserError(f"outputs to be kept hold a {kind}: preprocess_logits_for_metrics must give tensors") from error
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor[:rows]
    # numpy has no bfloat16.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def _join(arrays: tuple[Array, ...]) -> Array:
    # Without a need for padding, none is used, as not every dtype can hold -100.
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    shape = np.max([array.shape[1:] for array in arrays], axis=0).astype(int)
    whole = np.full((sum(len(array) for array in arrays), *shape), IGNORED, dtype=arrays[0].dtype)
    start = 0
    for array in arrays:
        whole[(slice(start, start + len(array)), *map(slice, array.shape[1:]))] = array
        start += len(array)
    return whole
