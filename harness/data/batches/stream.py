"""The training samples of one data-parallel coordinate, step after step.

A global batch is a run of samples in the order of `order.py`. It is dealt out in micro-batches: the k-th goes
to data rank k % dp_size, so that another data-parallel size computes the very same micro-batches elsewhere.
The only state is the number of samples consumed by all ranks together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.utils.data import IterableDataset

from harness.data.batches.collate import (
    Collator,
    MapDataset,
    MicroBatch,
    TokenCollator,
    as_micro_batch,
    collate,
    hidden_tokens,
)
from harness.data.batches.order import Indices, OwnOrder, SeveralSources, batch_indices
from harness.data.batches.padding import at_length, padding_of
from harness.data.batches.read_ahead import ReadAhead
from harness.errors import UserError
from harness.parallel.generators import own_generators, seed_of
from harness.resilience.process.activity import inside
from harness.wording import counted

_STEPS_MEASURED = 16  # to learn how much of the data is padding


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one data rank reads in a step.

    Attributes:
        consumed: samples before it.
        rows: of each of its micro-batches.
        lengths: that they are padded to; None where the data set pads nothing.
        seeds: of what data set and collator draw.
        length: the one of all micro-batches of the step, where they have to have one.
        tokens: of the step, of all data ranks, without padding; None where the data set does not know them.
    """

    consumed: int
    rows: list[list[int]]
    lengths: list[int | None]
    seeds: list[int]
    length: int | None
    tokens: int | None


class BatchStream:
    """Micro-batches without end: when the data is through, the next epoch begins in a new order.

    `dataset` is map-style (`len`, `[i]`); only rows of this `dp_rank` are read. `consumed`: samples used up
    by the run so far, to go on from. Raises UserError if the data set is smaller than one global batch.

    Attributes:
        before: what had been consumed before the last step.
        length: that the last step's samples were padded to, the same on every rank; None where they were not, or
            each micro-batch was to its own longest.
        sources: where the data has several, the number of the one that each sample of the last step comes from, a list
            a micro-batch of this rank.
        skipped: places in the order of samples, each the first and past the last, that no batch is made of.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        seed: int,
        micro_batch: int,
        accumulation: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed: int = 0,
        data_collator: Collator = collate,
        one_length: bool = False,
        workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.n = dataset_length(dataset)
        self.seed = seed
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.consumed = self.before = consumed
        self.sources: list[list[int]] = []
        self.skipped: list[list[int]] = []
        self.collator = data_collator
        self.one_length = one_length  # all micro-batches of a step are padded alike
        self.length: int | None = None
        self._ahead = ReadAhead(self._read, self._following, workers) if workers else None
        self._tokens: int | None = None
        self._masked = 0
        require_samples(self.n, micro_batch, accumulation, dp_size)

    @property
    def global_batch(self) -> int:
        """Samples that all data ranks together consume in a step."""
        return self.micro_batch * self.accumulation * self.dp_size

    @property
    def epoch(self) -> float:
        """Passes through the data so far."""
        return self.consumed / self.n

    def next_step(self, *, read: bool = True) -> list[MicroBatch]:
        """Return this coordinate's micro-batches of the next step, each (inputs, labels); the stream moves on.

        With `read` false none is read: for a rank that needs neither inputs nor labels.
        """
        self.before = self.consumed
        with inside("reading data"):
            plan = self._planned(self.consumed)
            self.consumed = plan.consumed + self.global_batch
            micro_batches, masked = (self._ahead or self._read)(plan) if read else ([], 0)
        self.length, self._tokens, self._masked = plan.length, plan.tokens, masked
        if isinstance(self.dataset, SeveralSources) and len(self.dataset.names) > 1 and read:
            self.sources = [self.dataset.sources_of(rows) for rows in plan.rows]
        return micro_batches

    def first_pass(self) -> list[list[int]]:
        """Return the rows of this rank's micro-batches in the first pass through the data, and in what fills its last
        round. UserError for a stream, whose rows are read once."""
        if isinstance(self.dataset, OwnOrder) and self.dataset.endless:
            raise UserError("a stream is read once, while training: iterate over the data set itself")
        round_size = self.micro_batch * self.dp_size
        rows = self._order(0, -(-self.n // round_size) * round_size).reshape(-1, self.micro_batch)
        mine: list[list[int]] = rows[self.dp_rank :: self.dp_size].tolist()
        return mine

    def tokens(self, units: int) -> int:
        """Return the tokens of the last step on all data ranks, without padding; `units`: on this one, with padding.

        They are counted where the data set knows its lengths. Else they are those of this rank, as far as no
        attention_mask hides them, times the data ranks.
        """
        if self._tokens is not None:
            return self._tokens
        counts_samples = units <= self.micro_batch * self.accumulation
        return (units if counts_samples else units - self._masked) * self.dp_size

    def padding_share(self) -> float:
        """Return which part of the tokens of the first steps is padding."""
        rows = self._order(0, self.global_batch * _STEPS_MEASURED)
        steps = rows.reshape(_STEPS_MEASURED, -1, self.micro_batch)
        found = [padding_of(self.dataset, batches, one_length=self.one_length) for batches in steps]
        return sum(each.padding for each in found) / max(sum(each.tokens for each in found), 1)

    def _order(self, consumed: int, count: int) -> Indices:
        """Return the `count` samples that follow the first `consumed`: a mixture has an order of its own."""
        if isinstance(self.dataset, OwnOrder):
            return self.dataset.order(consumed, count, self.seed)
        return batch_indices(consumed, count, self.n, self.seed)

    def close(self) -> None:
        """End the workers, if there are any."""
        if self._ahead is not None:
            self._ahead.close()

    def _read(self, plan: StepPlan) -> tuple[list[MicroBatch], int]:
        """Read the micro-batches of a step; also returns how many of their tokens an attention_mask hides."""
        read = [
            read_micro_batch(at_length(self.dataset, length), rows, self.collator, seed)
            for rows, length, seed in zip(plan.rows, plan.lengths, plan.seeds, strict=True)
        ]
        return [micro_batch for micro_batch, _ in read], sum(masked for _, masked in read)

    def _following(self, plan: StepPlan) -> Iterator[StepPlan]:
        """Give a plan and those of the steps after it."""
        while True:
            yield plan
            plan = self._planned(plan.consumed + self.global_batch)

    def _planned(self, consumed: int) -> StepPlan:
        """Return what this rank reads in the step after `consumed` samples, or after those left out there."""
        for first, stop in sorted(self.skipped):
            if first < consumed + self.global_batch and consumed < stop:
                consumed = stop
        batches = self._order(consumed, self.global_batch).reshape(-1, self.micro_batch)
        mine = slice(self.dp_rank, None, self.dp_size)
        found = padding_of(self.dataset, batches, one_length=self.one_length)
        lengths = [None] * len(batches) if found.lengths is None else found.lengths.tolist()
        places = range(consumed, consumed + self.global_batch, self.micro_batch)
        return StepPlan(
            consumed=consumed,
            rows=batches[mine].tolist(),
            lengths=lengths[mine],
            seeds=[seed_of("samples", self.seed, place) for place in places[mine]],
            length=lengths[0] if self.one_length else None,
            tokens=None if found.lengths is None else found.tokens - found.padding,
        )


def require_samples(count: int, micro_batch: int, accumulation: int, dp_size: int, *, at_most: bool = False) -> None:
    """Raise UserError for fewer samples than one global batch; `at_most`: `count` is their largest possible number."""
    if count < (batch := micro_batch * accumulation * dp_size):
        number = f"{'at most ' if at_most else ''}{counted(count, 'sample')}"
        raise UserError(
            f"the data set has {number}, fewer than one global batch of {batch} "
            f"(micro-batch {micro_batch} x accumulation {accumulation} x data parallel {dp_size}): "
            "give more text, a smaller --block_size or a smaller train_batch_size"
        )


def dataset_length(dataset: MapDataset | None) -> int:
    """Return the number of samples. UserError for a data set without a length or an index: it has no order."""
    # torch's IterableDataset has an index that raises, and may have a length
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if dataset is not None and map_style and not isinstance(dataset, IterableDataset):
        return len(dataset)
    raise UserError(
        f"{type(dataset).__name__} is not map-style: the data set needs len(dataset) and dataset[i]; a list of its "
        "samples has both"
    )


def data_digest(dataset: MapDataset, looked_at: int = 16) -> str:
    """Return a short hash of the length and of a few token samples, spread evenly: ranks with the same data agree.

    Other samples are not looked at: a data set may well draw them anew each time.
    """
    n = dataset_length(dataset)
    key = dataset.key if isinstance(dataset, OwnOrder) else ""
    if isinstance(dataset, OwnOrder) and dataset.endless:  # it is not read beforehand
        return key[:16]
    digest = hashlib.sha256(f"{n}{key}".encode())
    for i in sorted({k * (n - 1) // max(looked_at - 1, 1) for k in range(looked_at)} if n else ()):
        with own_generators(seed_of("digest", i)):
            sample = dataset[i]
        for name in ("input_ids", "labels", "position_ids"):
            if isinstance(sample, Mapping) and name in sample:
                with suppress(TypeError, ValueError, RuntimeError):  # refused where it is collated
                    digest.update(repr(torch.as_tensor(sample[name]).tolist()).encode())
    return digest.hexdigest()[:16]


def read_micro_batch(
    dataset: MapDataset, rows: Sequence[int], collator: Collator, seed: int = 0
) -> tuple[MicroBatch, int]:
    """Read these rows, in one call where the data set offers it, and collate them into (inputs, labels).

    Also returns how many tokens an attention_mask hides, of the samples or of what the collator makes of them.

    What data set and collator draw from the global generators depends on `seed` alone: every rank that reads these
    rows gets the same.
    """
    read = getattr(dataset, "__getitems__", None)
    with own_generators(seed):
        samples = read(list(rows)) if read is not None else [dataset[i] for i in rows]
        collated = collator(samples)
    masked = sum(map(hidden_tokens, [collated] if isinstance(collated, Mapping) else samples))
    micro_batch = as_micro_batch(collated)
    if isinstance(collator, TokenCollator):
        collator.check(micro_batch, rows, samples)
    return micro_batch, masked
