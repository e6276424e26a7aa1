"""The streams of all data ranks of a run, in one process."""

from harness.batches.stream import BatchStream


def ranks_of(dataset, seed, batch_ranks, consumed):
    """A stream for each data rank, of steps of eight samples in micro-batches of two; `dataset()` makes its data."""
    return [
        BatchStream(
            dataset(),
            seed=seed,
            micro_batch=2,
            accumulation=4 // batch_ranks,
            batch_rank=rank,
            batch_ranks=batch_ranks,
            consumed=consumed,
        )
        for rank in range(batch_ranks)
    ]
