"""The training samples of one data-parallel coordinate, step after step.

A global batch is a run of samples in the order of `order.py`. It is dealt out in micro-batches: the k-th goes
to data rank k % data_size, so that another data-parallel size computes the very same micro-batches elsewhere.
The only state is the number of samples consumed by all ranks together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from harness.errors import UserError
from harness.parallel.generators import own_generators, seed_of
from harness.training.batches.collate import Collator, MapDataset, MicroBatch, as_micro_batch, collate
from harness.training.batches.order import batch_indices
from harness.training.watch.activity import beat
from harness.wording import counted


class BatchStream:
    """Micro-batches without end: when the data is through, the next epoch begins in a new order.

    `dataset` is map-style (`len`, `[i]`); only rows of this `data_rank` are read. `consumed`: samples used up
    by the run so far, to go on from. Raises UserError if the data set is smaller than one global batch.

    Attributes:
        before: what had been consumed before the last step.
        skipped: places in the order of samples, each the first and past the last, that no batch is made of.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        seed: int,
        micro_batch: int,
        accumulation: int,
        data_rank: int = 0,
        data_size: int = 1,
        consumed: int = 0,
        data_collator: Collator = collate,
    ) -> None:
        self.dataset = dataset
        self.n = dataset_length(dataset)
        self.seed = seed
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.data_rank = data_rank
        self.data_size = data_size
        self.consumed = self.before = consumed
        self.skipped: list[list[int]] = []
        self.collator = data_collator
        if self.n < self.global_batch:
            raise UserError(
                f"the data set has {counted(self.n, 'sample')}, fewer than one global batch of {self.global_batch} "
                f"(micro-batch {micro_batch} x accumulation {accumulation} x data parallel {data_size}): "
                "give more text, a smaller --block_size or a smaller train_batch_size"
            )

    @property
    def global_batch(self) -> int:
        """Samples that all data ranks together consume in a step."""
        return self.micro_batch * self.accumulation * self.data_size

    @property
    def epoch(self) -> float:
        """Passes through the data so far."""
        return self.consumed / self.n

    def next_step(self, *, read: bool = True) -> list[MicroBatch]:
        """Return this coordinate's micro-batches of the next step, each (inputs, labels); the stream moves on.

        With `read` false none is read: for a rank that needs neither inputs nor labels.
        """
        beat("reading data")
        self.before = self.consumed
        for first, stop in sorted(self.skipped):
            if first < self.consumed + self.global_batch and self.consumed < stop:
                self.consumed = stop
        indices = batch_indices(self.consumed, self.global_batch, self.n, self.seed)
        mine = indices.reshape(self.accumulation, self.data_size, self.micro_batch)[:, self.data_rank]
        places = range(self.consumed + self.data_rank * self.micro_batch, 2**63, self.data_size * self.micro_batch)
        self.consumed += self.global_batch
        return [
            read_micro_batch(self.dataset, rows, self.collator, seed_of("samples", self.seed, place))
            for rows, place in zip(mine.tolist() if read else [], places, strict=False)
        ]


def dataset_length(dataset: MapDataset | None) -> int:
    """Return the number of samples. UserError for a data set without a length or an index: it has no order."""
    if dataset is not None and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return len(dataset)
    raise UserError(f"{type(dataset).__name__} is not map-style: the data set needs len(dataset) and dataset[i]")


def data_digest(dataset: MapDataset, looked_at: int = 16) -> str:
    """Return a short hash of the length and of a few token samples, spread evenly: ranks with the same data agree.

    Other samples are not looked at: a data set may well draw them anew each time.
    """
    n = dataset_length(dataset)
    digest = hashlib.sha256(str(n).encode())
    for i in sorted({k * (n - 1) // max(looked_at - 1, 1) for k in range(looked_at)} if n else ()):
        with own_generators(seed_of("digest", i)):
            sample = dataset[i]
        for name in ("input_ids", "labels", "position_ids"):
            if isinstance(sample, Mapping) and name in sample:
                digest.update(repr(torch.as_tensor(sample[name]).tolist()).encode())
    return digest.hexdigest()[:16]


def read_micro_batch(dataset: MapDataset, rows: Sequence[int], collator: Collator, seed: int = 0) -> MicroBatch:
    """Read these rows, in one call where the data set offers it, and collate them into (inputs, labels).

    What data set and collator draw from the global generators depends on `seed` alone: every rank that reads these
    rows gets the same.
    """
    read = getattr(dataset, "__getitems__", None)
    with own_generators(seed):
        samples = read(list(rows)) if read is not None else [dataset[i] for i in rows]
        return as_micro_batch(collator(samples))
