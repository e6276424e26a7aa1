"""Rules about the batch: train_batch_size = micro-batch x accumulation x data-parallel size."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.diagnostic import Severity
from harness.config.rules.rule import Finding, rule
from harness.config.values.batch import complete
from harness.config.values.pointers import AUTO, whole
from harness.config.view import RunView
from harness.wording import counted

TRAIN, MICRO, STEPS = "/train_batch_size", "/train_micro_batch_size_per_gpu", "/gradient_accumulation_steps"


@rule(
    "DS301",
    "no-batch-size",
    Severity.ERROR,
    claim="refuses",
    wrong='{"gradient_accumulation_steps": 8}',
    right='{"gradient_accumulation_steps": 8, "train_micro_batch_size_per_gpu": 1}',
)
def no_batch_size(view: RunView) -> Iterator[Finding]:
    """Neither train_batch_size nor train_micro_batch_size_per_gpu is given.

    The number of accumulation steps alone says nothing about the batch. With the harness and the
    HuggingFace Trainer `"train_micro_batch_size_per_gpu": "auto"` takes the size from the arguments.
    """
    if view.get(TRAIN) is None and view.get(MICRO) is None:
        value = '"auto"' if view.target != "deepspeed" else "a number"
        yield Finding(
            pointer=STEPS if view.has(STEPS) else "",
            message="no batch size: neither train_batch_size nor train_micro_batch_size_per_gpu is given",
            hint=f"add train_micro_batch_size_per_gpu, as {value}",
            deepspeed="raises AssertionError",
        )


@rule(
    "DS302",
    "batch-sizes-disagree",
    Severity.ERROR,
    claim="refuses",
    wrong='{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}',
    right='{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}',
)
def batch_sizes_disagree(view: RunView) -> Iterator[Finding]:
    """The batch sizes do not agree.

    train_batch_size must be the micro-batch times the accumulation steps times the number of data-parallel
    ranks. Without `--world_size` this is reported where no number of ranks at all would fit. With the
    harness only the data-parallel ranks count: ranks / (pipeline stages x tensor-parallel ranks).
    """
    values = [view.get(pointer) for pointer in (TRAIN, MICRO, STEPS)]
    if any(value not in (None, AUTO) and (whole(value) or 0) < 1 for value in values):
        return  # a wrong value is told as such
    train, micro, steps = (whole(value) for value in values)
    if train is None or (view.world_size is not None and view.data_parallel is None):
        return
    ranks = view.data_parallel or _some_ranks(train, micro, steps)
    batch = complete(train, micro, steps, ranks)
    if batch is None or batch.fits(ranks):
        return
    product = " x ".join(str(size) for size in (micro, steps) if size is not None)
    given = "micro-batch x accumulation" if micro and steps else "micro-batch" if micro else "accumulation"
    where = f" x {counted(ranks, 'data-parallel rank')}" if view.data_parallel else ""
    yield Finding(
        pointer=TRAIN,
        message=f"train_batch_size {train} is not a multiple of {given} {product}{where}"
        if product and not (micro and steps and view.data_parallel)
        else f"train_batch_size {train} is not {given + ' ' + product if product else 'a multiple of'}{where}",
        hint='give two of the three sizes, or write "auto" for one',
        deepspeed="raises AssertionError",
        on_value=True,
    )


def _some_ranks(train: int, micro: int | None, steps: int | None) -> int:
    """The number of ranks at which the sizes are most likely to fit."""
    return max(1, train // (micro * steps)) if micro and steps else 1
