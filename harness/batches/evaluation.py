"""Give every rank the same number of evaluation micro-batches of equal shape, for any number of samples.

With a pipeline, tensor parallelism or ZeRO-3, a rank with fewer micro-batches would leave the others waiting in a
collective forever. So the last micro-batches are filled up with repeated samples that do not count. The mean is the sum
over the first `rows` samples (or over labels other than -100) divided by their number, both summed over the
data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from harness.batches.collate import IGNORED, AnyDataset, Collator, MapDataset, collate
from harness.batches.padding import Padding, at_length, padding_of
from harness.batches.stream import data_digest, dataset_length, read_micro_batch
from harness.errors import UserError
from harness.parallel.generators import seed_of
from harness.parallel.values import Value

EvaluationData: TypeAlias = "MapDataset | Mapping[str, MapDataset] | None"
"""The evaluation data of a run: none, one data set, or several by name."""


_Data = TypeVar("_Data", bound=AnyDataset)


def by_prefix(data: _Data | Mapping[str, _Data] | None, prefix: str = "eval") -> dict[str, _Data]:
    """Return metric prefix -> data set: `eval` for a single data set, `eval_NAME` for several."""
    if data is None:
        return {}
    return {f"{prefix}_{name}": each for name, each in data.items()} if isinstance(data, Mapping) else {prefix: data}


def evaluation_digest(data: EvaluationData) -> str:
    """Return a short hash of the data sets, to compare the data of ranks; "" without data."""
    digests = {prefix: data_digest(each) for prefix, each in by_prefix(data).items()}
    return digests.get("eval") or " ".join(f"{prefix} {digest}" for prefix, digest in digests.items())


@dataclass(frozen=True, kw_only=True)
class EvaluationBatch:
    """An evaluation micro-batch. Only the first `rows` samples count; the others fill up the shape.

    If labels are token labels (int64, shaped like the ids), the filling rows have only label -100, so a loss that
    averages over valid labels needs no `rows`. For any other labels the loss is computed on `outputs[:rows]` and
    `labels[:rows]`, and skipped if `rows` is 0.
    """

    inputs: Value
    labels: Value
    rows: int


def evaluation_steps(n: int, micro_batch: int, batch_ranks: int = 1) -> int:
    """Return the number of micro-batches that each data-parallel rank evaluates for `n` samples."""
    return -(-n // (micro_batch * batch_ranks))


def evaluation_batches(
    dataset: MapDataset,
    micro_batch: int,
    batch_rank: int = 0,
    batch_ranks: int = 1,
    *,
    rows: range | None = None,
    alike: int = 1,
    data_collator: Collator = collate,
) -> Iterator[EvaluationBatch]:
    """Yield this rank's micro-batches. Over all data-parallel ranks, each sample counts once, in data-set order.

    Each rank gets `evaluation_steps` micro-batches; micro-batch k goes to batch rank k % batch_ranks. No state is kept,
    so an evaluation can be abandoned and repeated.

    Args:
        rows: indices of the samples; by default all.
        alike: number of consecutive micro-batches of a rank that are padded to one length; 0: no padding here, each
            sample keeps the length that the data set gives it.

    Raises:
        UserError: there are no samples.
    """
    rows = range(dataset_length(dataset)) if rows is None else rows
    # Refused by the call itself: a generator would raise only at the first micro-batch.
    if not rows:
        raise UserError("the evaluation data set is empty")
    return _batches(dataset, rows, micro_batch, batch_rank, batch_ranks, alike, data_collator)


def _batches(
    dataset: MapDataset,
    rows: range,
    micro_batch: int,
    batch_rank: int,
    batch_ranks: int,
    alike: int,
    collator: Collator,
) -> Iterator[EvaluationBatch]:
    n = len(rows)
    stride = micro_batch * batch_ranks
    starts = range(batch_rank * micro_batch, evaluation_steps(n, micro_batch, batch_ranks) * stride, stride)
    # Fill up from the front of the data set: these rows exist, and every rank computes the same ones.
    batches = [[rows[k if k < n else (k - start) % n] for k in range(start, start + micro_batch)] for start in starts]
    for first in range(0, len(batches), max(alike, 1)):
        group = slice(first, first + max(alike, 1))
        found = padding_of(dataset, np.array(batches[group]), one_length=True) if alike else Padding()
        padded = at_length(dataset, None if found.lengths is None else int(found.lengths[0]))
        for start, chosen in zip(starts[group], batches[group], strict=True):
            counted = min(max(n - start, 0), micro_batch)
            # Seeded by the position alone: random collators then give the same evaluation in every layout and step.
            (inputs, labels), _ = read_micro_batch(padded, chosen, collator, seed_of("evaluation", start))
            if counted < micro_batch and isinstance(labels, torch.Tensor) and _are_token_labels(inputs, labels):
                # A collator may have returned a tensor that it keeps.
                labels = labels.clone()
                labels[counted:] = IGNORED
            yield EvaluationBatch(inputs=inputs, labels=labels, rows=counted)


def _are_token_labels(inputs: Value, labels: torch.Tensor) -> bool:
    """Return whether each token has a label, as in a language model, so that -100 excludes it from the loss."""
    ids = inputs[0] if isinstance(inputs, (tuple, list)) else inputs
    return isinstance(ids, torch.Tensor) and ids.dtype == labels.dtype == torch.long and ids.shape == labels.shape
