"""Stream the training samples of one data-parallel coordinate, step after step.

A global batch is consecutive samples in the order of `order.py`, cut into micro-batches. Micro-batch k goes to batch
rank k % batch_ranks, so another data-parallel size computes the same micro-batches on other ranks. The only state is
the number of samples that all ranks together have consumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch.utils.data import IterableDataset

from harness.batches.collate import (
    Collator,
    MapDataset,
    MicroBatch,
    TokenCollator,
    as_micro_batch,
    collate,
    hidden_tokens,
)
from harness.batches.order import Indices, OwnOrder, SeveralSources, batch_indices
from harness.batches.padding import PaddedSamples, at_length, padding_of
from harness.errors import UserError
from harness.parallel.generators import own_generators, reseed, seed_of
from harness.resilience.process.activity import inside
from harness.wording import counted

_STEPS_MEASURED = 16  # for an estimate of the share of padding
# Number of samples whose order is computed at once: the network takes as long for one as for hundreds.
_ORDERED = 1024


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The samples that a data-parallel rank reads in a step.

    Attributes:
        consumed: samples consumed before this step.
        rows: sample indices [micro-batches][samples].
        lengths: padded length of each micro-batch in tokens; None if the data set does not pad.
        places: position of each micro-batch's first sample in the sample order.
        length: the common length of all micro-batches of the step, if the run needs one.
        tokens: tokens of the step on all data-parallel ranks, without padding; None if the lengths are not known.
    """

    consumed: int
    rows: list[list[int]]
    lengths: list[int | None]
    places: range
    length: int | None
    tokens: int | None


ReadStep: TypeAlias = Callable[[StepPlan], tuple[list[MicroBatch], int]]
"""Reads the micro-batches of a step; also returns the number of tokens hidden by an attention_mask."""


class StepReader(Protocol):
    """Reads steps ahead."""

    def __call__(self, plan: StepPlan, /) -> tuple[list[MicroBatch], int]:
        """Return the step of `plan`, as `ReadStep` does."""

    def close(self) -> None:
        """Stop reading."""


OpenReader: TypeAlias = Callable[[ReadStep, Callable[[StepPlan], Iterator[StepPlan]]], StepReader]
"""Makes a reader. Arguments: a function that reads a step, and one that yields a plan and all plans after it."""


class BatchStream:
    """An endless stream of micro-batches: after the last sample, the next epoch begins in a new order.

    `dataset` is map-style (`len`, `[i]`); only rows of this `batch_rank` are read. `consumed` is the number of samples
    consumed so far. Raises UserError if the data set is smaller than a global batch.

    Attributes:
        global_batch: number of samples that all data ranks together consume in a step.
        before: samples consumed before the last step.
        length: padded length of the last step's samples in tokens, the same on every rank; None if the step has no
            common length.
        sources: source of each sample of the last step [micro-batches of this rank][samples], if there are several.
        skipped: ranges [first, stop) of the sample order to skip, after steps with a non-finite loss.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        seed: int,
        micro_batch: int,
        accumulation: int,
        batch_rank: int = 0,
        batch_ranks: int = 1,
        consumed: int = 0,
        data_collator: Collator = collate,
        one_length: bool = False,
        read_ahead: OpenReader | None = None,
    ) -> None:
        self.dataset = dataset
        self.n = dataset_length(dataset)
        self.seed = seed
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.batch_rank = batch_rank
        self.batch_ranks = batch_ranks
        self.global_batch = micro_batch * accumulation * batch_ranks
        self.consumed = self.before = consumed
        self.sources: list[list[int]] = []
        self.skipped: list[list[int]] = []
        self.collator = data_collator
        self.one_length = one_length  # all micro-batches of a step are padded alike
        self.length: int | None = None
        self._ahead = None if read_ahead is None else read_ahead(self._read, self._following)
        self._pads = isinstance(dataset, PaddedSamples)
        self._has_sources = isinstance(dataset, SeveralSources) and len(dataset.names) > 1
        self._ordered = np.empty(0, dtype=np.int64)  # indices of the samples after the first `_ordered_from`
        self._ordered_from = 0
        self._tokens: int | None = None
        self._masked = 0
        require_samples(self.n, micro_batch, accumulation, batch_ranks)

    @property
    def epoch(self) -> float:
        """Passes through the data so far."""
        return self.consumed / self.n

    def next_step(self, *, read: bool = True) -> list[MicroBatch]:
        """Advance by one step and return this coordinate's micro-batches, each (inputs, labels).

        With `read=False` return none: for ranks of the middle stages, which need neither inputs nor labels.
        """
        self.before = self.consumed
        with inside("reading data"):
            plan = self._planned(self.consumed)
            self.consumed = plan.consumed + self.global_batch
            micro_batches, masked = (self._ahead or self._read)(plan) if read else ([], 0)
        self.length = plan.length
        self._tokens = plan.tokens
        self._masked = masked
        if self._has_sources and read:
            assert isinstance(self.dataset, SeveralSources)
            self.sources = [self.dataset.sources_of(rows) for rows in plan.rows]
        return micro_batches

    def first_pass(self) -> list[list[int]]:
        """Return the sample indices of this rank's micro-batches in one pass through the data.

        The last round is filled up from the second pass, so that all ranks get the same number. Raises UserError for a
        stream, which is read only once.
        """
        if isinstance(self.dataset, OwnOrder) and self.dataset.endless:
            raise UserError("a stream is read once, while training: iterate over the data set itself")
        round_size = self.micro_batch * self.batch_ranks
        rows = self._order(0, -(-self.n // round_size) * round_size).reshape(-1, self.micro_batch)
        mine: list[list[int]] = rows[self.batch_rank :: self.batch_ranks].tolist()
        return mine

    def tokens(self, units: int) -> int:
        """Return the number of tokens of the last step on all data-parallel ranks, without padding.

        Exact if the data set knows its lengths. Otherwise an estimate: this rank's tokens, except the ones hidden by an
        attention_mask, times the number of data-parallel ranks.

        Args:
            units: this rank's tokens with padding, or samples if the model has no tokens.
        """
        if self._tokens is not None:
            return self._tokens
        # No more units than samples: then they are samples, and no mask hides any.
        counts_samples = units <= self.micro_batch * self.accumulation
        return (units if counts_samples else units - self._masked) * self.batch_ranks

    def padding_share(self) -> float:
        """Return the fraction of padding among the tokens of the first 16 steps."""
        rows = self._order(0, self.global_batch * _STEPS_MEASURED)
        steps = rows.reshape(_STEPS_MEASURED, -1, self.micro_batch)
        found = [padding_of(self.dataset, batches, one_length=self.one_length) for batches in steps]
        return sum(each.padding for each in found) / max(sum(each.tokens for each in found), 1)

    def _order(self, consumed: int, count: int) -> Indices:
        """Return the indices of the `count` samples after the first `consumed`; a mixture decides its own order."""
        if isinstance(self.dataset, OwnOrder):
            return self.dataset.order(consumed, count, self.seed)
        return batch_indices(consumed, count, self.n, self.seed)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def _read(self, plan: StepPlan) -> tuple[list[MicroBatch], int]:
        """Return the micro-batches of a step, and the number of their tokens hidden by an attention_mask."""
        micro_batches = []
        masked = 0
        with own_generators(self.seed):
            for rows, length, place in zip(plan.rows, plan.lengths, plan.places, strict=True):
                # This seed depends on the place in the sample order, not on the rank: it is equal in every layout.
                reseed(seed_of("samples", self.seed, place))
                padded = self.dataset if length is None else at_length(self.dataset, length)
                micro_batch, hidden = _collated(padded, rows, self.collator)
                micro_batches.append(micro_batch)
                masked += hidden
        return micro_batches, masked

    def _following(self, plan: StepPlan) -> Iterator[StepPlan]:
        """Yield a plan and the plans of all later steps."""
        while True:
            yield plan
            plan = self._planned(plan.consumed + self.global_batch)

    def _planned(self, consumed: int) -> StepPlan:
        """Return the plan of the step after `consumed` samples, or after the skipped range that it would overlap."""
        # In order, as the step after a skipped range may overlap the next range.
        for first, stop in sorted(self.skipped):
            if first < consumed + self.global_batch and consumed < stop:
                consumed = stop
        start = consumed - self._ordered_from
        if not 0 <= start <= len(self._ordered) - self.global_batch:
            self._ordered = self._order(consumed, max(self.global_batch, _ORDERED))
            self._ordered_from = consumed
            start = 0
        batches = self._ordered[start : start + self.global_batch].reshape(-1, self.micro_batch)
        lengths: list[int | None] = [None] * len(batches)
        tokens = None
        if self._pads:
            found = padding_of(self.dataset, batches, one_length=self.one_length)
            assert found.lengths is not None
            lengths = found.lengths.tolist()
            tokens = found.tokens - found.padding
        # In turn, not in blocks: another number of batch ranks then computes the same micro-batches.
        mine = slice(self.batch_rank, None, self.batch_ranks)
        return StepPlan(
            consumed=consumed,
            rows=batches[mine].tolist(),
            lengths=lengths[mine],
            places=range(consumed, consumed + self.global_batch, self.micro_batch)[mine],
            length=lengths[0] if self.one_length else None,
            tokens=tokens,
        )


def require_samples(
    count: int, micro_batch: int, accumulation: int, batch_ranks: int, *, at_most: bool = False
) -> None:
    """Raise UserError for fewer samples than one global batch.

    With `at_most` the number of samples is not known yet and `count` is an upper bound.
    """
    if count < (batch := micro_batch * accumulation * batch_ranks):
        number = f"{'at most ' if at_most else ''}{counted(count, 'sample')}"
        raise UserError(
            f"the data set has {number}, fewer than one global batch of {batch} "
            f"(micro-batch {micro_batch} x accumulation {accumulation} x data parallel {batch_ranks}): "
            "give more text, a smaller --block_size or a smaller train_batch_size"
        )


def dataset_length(dataset: MapDataset | None) -> int:
    """Return the number of samples. Raises UserError without a length or an index, as it could not be shuffled."""
    # torch's IterableDataset has a __getitem__ that only raises, and may have a length: its class excludes it.
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if dataset is not None and map_style and not isinstance(dataset, IterableDataset):
        return len(dataset)
    raise UserError(
        f"{type(dataset).__name__} is not map-style: the data set needs len(dataset) and dataset[i]; a list of its "
        "samples has both"
    )


def data_digest(dataset: MapDataset, looked_at: int = 16) -> str:
    """Return a short hash of the length and a few evenly spaced samples, to compare the data of ranks."""
    n = dataset_length(dataset)
    key = dataset.key if isinstance(dataset, OwnOrder) else ""
    # A stream must not be read before training.
    if isinstance(dataset, OwnOrder) and dataset.endless:
        return key[:16]
    digest = hashlib.sha256(f"{n}{key}".encode())
    for i in sorted({k * (n - 1) // max(looked_at - 1, 1) for k in range(looked_at)} if n else ()):
        # A data set may draw random numbers, which must not make equal data look different.
        with own_generators(seed_of("digest", i)):
            sample = dataset[i]
        # Only token columns: others may change at each access.
        for name in ("input_ids", "labels", "position_ids"):
            if isinstance(sample, Mapping) and name in sample:
                # The collator will report a column that is not a list of numbers.
                with suppress(TypeError, ValueError, RuntimeError):
                    digest.update(repr(torch.as_tensor(sample[name]).tolist()).encode())
    return digest.hexdigest()[:16]


def fingerprint(*parts: object) -> str:
    """Return a hash of the values as text, the same in every process and run."""
    # `datasets` hashes pickles, which differ between versions and change when a tokenizer is used.
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogatepass")).hexdigest()[:32]


def read_micro_batch(
    dataset: MapDataset, rows: Sequence[int], collator: Collator, seed: int = 0
) -> tuple[MicroBatch, int]:
    """Read and collate these rows; return (inputs, labels) and the number of tokens hidden by an attention_mask.

    Uses `dataset.__getitems__` if it exists, like torch's DataLoader. Data set and collator run with global generators
    seeded by `seed`, so every rank that reads these rows gets the same random numbers.
    """
    with own_generators(seed):
        return _collated(dataset, rows, collator)


def _collated(dataset: MapDataset, rows: Sequence[int], collator: Collator) -> tuple[MicroBatch, int]:
    """Read and collate like `read_micro_batch`, without seeding the generators."""
    read = getattr(dataset, "__getitems__", None)
    samples = read(list(rows)) if read is not None else [dataset[i] for i in rows]
    collated = collator(samples)
    masked = hidden_tokens([collated] if isinstance(collated, Mapping) else samples)
    micro_batch = as_micro_batch(collated)
    if isinstance(collator, TokenCollator):
        collator.check(micro_batch, rows, samples)
    return micro_batch, masked
