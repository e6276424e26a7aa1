"""The arithmetic of the batch: train_batch_size = micro-batch x accumulation x data-parallel size.

DeepSpeed's rule fills in what is not said. One home for it: `check` and `resolve` both ask here. With
pipeline or tensor parallelism only the data-parallel size counts, not the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples: `train` a step, `micro` at a time on a data-parallel rank, `accumulation` times a step."""

    train: int
    micro: int
    accumulation: int

    def fits(self, data_parallel: int) -> bool:
        """Whether the three agree, each at least 1."""
        sizes_are_positive = min(self.train, self.micro, self.accumulation) > 0
        return sizes_are_positive and self.train == self.micro * self.accumulation * data_parallel


def complete(train: int | None, micro: int | None, accumulation: int | None, data_parallel: int) -> Batch | None:
    """The batch that DeepSpeed makes of what is given; None where it has too little. It need not fit.

    Source: DeepSpeedConfig._set_batch_related_parameters.
    """
    if train is not None:
        if micro is not None and accumulation is None:
            accumulation = train // micro // data_parallel if micro else 0
        elif micro is None and accumulation is not None:
            micro = train // data_parallel // accumulation if accumulation else 0
        elif micro is None or accumulation is None:
            micro, accumulation = train // data_parallel, 1
    elif micro is not None:
        accumulation = 1 if accumulation is None else accumulation
        train = micro * accumulation * data_parallel
    if train is None or micro is None or accumulation is None:
        return None
    return Batch(train=train, micro=micro, accumulation=accumulation)


def bubble(stages: int, micro_batches: int) -> float:
    """The idle share of a pipeline step, (p - 1) / (m + p - 1). GPipe, arXiv 1811.06965, section 2.3."""
    return (stages - 1) / (micro_batches + stages - 1)
