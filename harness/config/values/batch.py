"""Batch arithmetic: train_batch_size = micro-batch x accumulation x data-parallel size.

Missing sizes follow from the others by DeepSpeed's rule, for `check` and `resolve` alike. With pipeline or tensor
parallelism, the data-parallel size counts, not the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.config.values.arguments import AutoValues
from harness.config.values.pointers import AUTO, lookup, whole
from harness.schedules import DEFAULT, model_chunks, named
from harness.wording import counted

# Number of gradient elements that ZeRO reduces at once. Each reduction, however small, costs the host some hundred
# operations; the maximum is DeepSpeed's default, of which it allocates all, even for a smaller model.
LEAST_BUCKET = 2**22
MOST_BUCKET = 500_000_000
MOST_IDLE = 0.2  # share of a pipeline's step above which more micro-batches are advised
TRAIN = "/train_batch_size"
MICRO = "/train_micro_batch_size_per_gpu"
ACCUMULATION = "/gradient_accumulation_steps"
ARGUMENTS = {
    TRAIN: "global_batch_size",
    MICRO: "per_device_train_batch_size",
    ACCUMULATION: "gradient_accumulation_steps",
}


@dataclass(frozen=True, kw_only=True)
class StatedSizes:
    """The sizes given by file and arguments, or None; `sources` has the source of each."""

    train: int | None
    micro: int | None
    accumulation: int | None
    sources: Mapping[str, str]

    @property
    def train_name(self) -> str:
        """The flag or key that sets the global batch size, for messages."""
        return self.sources.get(TRAIN, "train_batch_size")


def stated_sizes(config: Mapping[str, object], values: AutoValues | None) -> StatedSizes:
    """Return the sizes given by a config and by the arguments of a run (None if unknown).

    If `--global_batch_size` or train_batch_size fixes the global batch, the accumulation follows from it. Otherwise
    micro-batch and accumulation take the arguments' defaults, in every layout.
    """
    sizes = {pointer: whole(lookup(config, pointer)) for pointer in ARGUMENTS}
    sources: dict[str, str] = {}

    def take(pointer: str) -> None:
        if values is not None and (size := getattr(values, ARGUMENTS[pointer])) is not None:
            sizes[pointer] = size
            sources[pointer] = values.source(ARGUMENTS[pointer])

    for pointer, name in ARGUMENTS.items():
        if values is not None and name in values.given:
            take(pointer)
    fixed = sizes[TRAIN] is not None
    has_accumulation = sizes[ACCUMULATION] is not None
    from_arguments = lookup(config, MICRO) == AUTO or TRAIN in sources
    # A file with train_batch_size alone keeps DeepSpeed's rule: one micro-batch per step.
    if sizes[MICRO] is None and (not fixed or (not has_accumulation and from_arguments)):
        take(MICRO)
    if not has_accumulation and not fixed:
        take(ACCUMULATION)
    return StatedSizes(train=sizes[TRAIN], micro=sizes[MICRO], accumulation=sizes[ACCUMULATION], sources=sources)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples per step (`train`) and per micro-batch (`micro`), and micro-batches per step and data-parallel rank
    (`accumulation`)."""

    train: int
    micro: int
    accumulation: int

    def fits(self, dp_size: int) -> bool:
        """Return whether the three sizes agree and are positive."""
        sizes_are_positive = min(self.train, self.micro, self.accumulation) > 0
        return sizes_are_positive and self.train == self.micro * self.accumulation * dp_size


def complete(train: int | None, micro: int | None, accumulation: int | None, dp_size: int) -> Batch | None:
    """Return the batch that DeepSpeed computes from the given sizes, which may disagree; None if too few are given.

    Source: DeepSpeedConfig._set_batch_related_parameters.
    """
    # A size of 0 gives 0 instead of an error, as the check refuses it under its key.
    if train is not None:
        if micro is not None and accumulation is None:
            accumulation = train // micro // dp_size if micro else 0
        elif micro is None and accumulation is not None:
            micro = train // dp_size // accumulation if accumulation else 0
        elif micro is None or accumulation is None:
            micro = train // dp_size
            accumulation = 1
    elif micro is not None:
        accumulation = 1 if accumulation is None else accumulation
        train = micro * accumulation * dp_size
    if train is None or micro is None or accumulation is None:
        return None
    return Batch(train=train, micro=micro, accumulation=accumulation)


def bubble(num_stages: int, micro_batches: int, schedule: str = DEFAULT, chunks_per_stage: int | None = None) -> float:
    """Return the idle share of a pipeline step for p equal stages of v chunks and m micro-batches.

    For GPipe (arXiv 1811.06965, section 2.3) and 1F1B with a flush (arXiv 2104.04473, section 2.2) it is
    (p - 1) / (m + p - 1); the latter states it relative to the ideal time, (p - 1) / m. Interleaving v chunks divides
    the idle time by v (same section). Deferred weight gradients fill two thirds of it if forward, input gradients and
    weight gradients take equally long (arXiv 2401.10241, section 3.1, for m >= p). Folded chunks leave a sixth, for
    m >= 2 p (section 6).
    """
    chunks = model_chunks(num_stages, schedule, chunks_per_stage)
    waits = named(schedule).waits(chunks, micro_batches) if num_stages > 1 else 0
    return waits / (3 * micro_batches * chunks.per_stage + waits)


def bucket_elements(hidden: int) -> int:
    """Return the default number of gradient elements that ZeRO reduces at once: hidden size squared, within bounds."""
    return min(max(hidden**2, LEAST_BUCKET), MOST_BUCKET)


def idle(num_stages: int, micro_batches: int, schedule: str = DEFAULT, chunks_per_stage: int | None = None) -> str:
    """Return a sentence such as `2 stages with 1 micro-batch are idle for 50% of a step`."""
    batches = counted(micro_batches, "micro-batch", "micro-batches")
    share = bubble(num_stages, micro_batches, schedule, chunks_per_stage)
    return f"{num_stages} stages with {batches} are idle for {share:.0%} of a step"


def micro_batches_wanted(num_stages: int, schedule: str = DEFAULT, chunks_per_stage: int | None = None) -> int:
    """Return the smallest number of micro-batches per step with which stages idle for at most `MOST_IDLE` of it."""
    # 1F1B idles for (p - 1) / (m + p - 1) of a step: at most a fifth from m = 4 (p - 1) on. Other schedules idle less.
    least = 0
    enough = 4 * (num_stages - 1)
    while enough - least > 1:
        middle = (least + enough) // 2
        if bubble(num_stages, middle, schedule, chunks_per_stage) <= MOST_IDLE:
            enough = middle
        else:
            least = middle
    return enough
