"""The streams of all data ranks of a run, in one process."""

from harness.batches.stream import BatchStream


def ranks_of(dataset, seed, dp_size, consumed):
    """A stream for each data rank, of steps of eight samples in micro-batches of two; `dataset()` makes its data."""
    return [
        BatchStream(
            dataset(),
            seed=seed,
            micro_batch=2,
            accumulation=4 // dp_size,
            dp_rank=rank,
            dp_size=dp_size,
            consumed=consumed,
        )
        for rank in range(dp_size)
    ]
