"""Rules about the batch: train_batch_size = micro-batch x accumulation x data-parallel size."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.batch import (
    ACCUMULATION,
    ARGUMENTS,
    MICRO,
    TRAIN,
    StatedSizes,
    complete,
    stated_sizes,
)
from harness.config.values.pointers import AUTO, whole
from harness.wording import counted, one_of


@rule("DS301", "no-batch-size", Severity.ERROR, claim="refuses")
def no_batch_size(view: RunView) -> Iterator[Finding]:
    """Neither train_batch_size nor train_micro_batch_size_per_gpu is given.

    The number of accumulation steps alone says nothing about the batch. With the harness and the
    HuggingFace Trainer `"train_micro_batch_size_per_gpu": "auto"` takes the size from the arguments.

    Wrong: {"gradient_accumulation_steps": 8}
    Right: {"gradient_accumulation_steps": 8, "train_micro_batch_size_per_gpu": 1}
    """
    if view.in_file(TRAIN) is None and view.in_file(MICRO) is None:
        value = '"auto"' if view.target != "deepspeed" else "a number"
        yield Finding(
            pointer=ACCUMULATION if ACCUMULATION[1:] in view.document.data else "",
            message="no batch size: neither train_batch_size nor train_micro_batch_size_per_gpu is given",
            hint=f"add train_micro_batch_size_per_gpu, as {value}",
            deepspeed="raises AssertionError",
        )


@rule("DS302", "batch-sizes-disagree", Severity.ERROR, claim="refuses")
def batch_sizes_disagree(view: RunView) -> Iterator[Finding]:
    """The batch sizes do not agree.

    train_batch_size must be the micro-batch times the accumulation steps times the number of data-parallel
    ranks. Without `--world_size` this is reported only if they agree for no number of ranks. With the harness only
    ranks that read different samples count: ranks / (pipeline stages x tensor-parallel ranks x context ranks).

    Wrong: {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    Right: {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    """
    in_file = [view.in_file(pointer) for pointer in ARGUMENTS]
    if any(size not in (None, AUTO) and (whole(size) or 0) < 1 for size in in_file):
        return  # another rule reports a wrong value
    sizes = stated_sizes(view.file_as_read, view.arguments)
    if sizes.train is None or (view.world_size is not None and view.batch_ranks is None):
        return
    ranks = view.batch_ranks or _some_ranks(sizes.train, sizes.micro, sizes.accumulation)
    batch = complete(sizes.train, sizes.micro, sizes.accumulation, ranks)
    if batch is None or batch.fits(ranks):
        return
    known = view.batch_ranks is not None
    message, hint = batch_size_conflict(sizes, ranks, cp_size=view.cp_size, ranks_are_known=known)
    yield Finding(pointer=TRAIN, message=message, hint=hint, deepspeed="raises AssertionError", on_value=True)


@rule("DS306", "batch-counts-tensor-parallel-ranks", Severity.WARNING, claim="elsewhere", target="deepspeed")
def batch_counts_tensor_parallel_ranks(view: RunView) -> Iterator[Finding]:
    """train_batch_size is given together with DeepSpeed's AutoTP, which trains a smaller batch.

    DeepSpeed compares train_batch_size with micro-batch x accumulation x all ranks, but the ranks of a tensor-parallel
    group read the same samples. The harness counts only ranks that read different ones; with it this is not reported.

    Wrong: {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}
    Right: {"train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 2}}
    """
    size = whole(view.as_read(TRAIN))
    if view.target != "harness" and view.tp_size > 1 and size is not None and size > 0:
        yield Finding(
            pointer=TRAIN,
            message=f"train_batch_size is {size}, but with autotp_size {view.tp_size} a step trains "
            + (f"{size // view.tp_size} samples" if size % view.tp_size == 0 else "fewer samples"),
            hint="remove train_batch_size, and set train_micro_batch_size_per_gpu and gradient_accumulation_steps",
            deepspeed="counts every rank as data-parallel, also those of one tensor-parallel group",
            on_value=True,
        )


def _some_ranks(train: int, micro: int | None, steps: int | None) -> int:
    """Return the largest number of ranks for which the micro-batches do not exceed the global batch; at least 1."""
    return max(1, train // (micro * steps)) if micro and steps else 1


def batch_size_conflict(
    sizes: StatedSizes, batch_ranks: int, *, cp_size: int = 1, ranks_are_known: bool = True
) -> tuple[str, str]:
    """Return a message for three sizes that do not multiply, and advice with sizes that do.

    Args:
        batch_ranks: number of data-parallel ranks that read different samples; `cp_size` ranks share each.
    """
    name, train, micro, accumulation = sizes.train_name, sizes.train, sizes.micro, sizes.accumulation
    factors = {"micro-batch": micro, "accumulation": accumulation}
    known = [f"{words} {size}" for words, size in factors.items() if size is not None]
    rank = "data-parallel rank" if cp_size == 1 else f"data-parallel / {cp_size} context rank"
    count = batch_ranks if cp_size == 1 else batch_ranks * cp_size
    ranks = [counted(count, rank)] if ranks_are_known or not known else []
    is_product = len(known) == 2 and bool(ranks)
    message = f"{name} {train} is not {'' if is_product else 'a multiple of '}{' x '.join([*known, *ranks])}"
    others = (batch_ranks if ranks_are_known else 1) * (accumulation or 1)
    unit = others * (micro or 1)
    if train is None or unit < 1 or train < 1:
        return message, "use sizes of at least 1"
    if is_product:
        return message, f"use {name} {unit}, or leave one of the three sizes out"
    near = sorted({max(1, train // unit) * unit, (train // unit + 1) * unit})
    hint = f"use {name} {one_of(near)}"
    if micro is not None and train % others == 0:
        share = train // others
        fits = [size for size in range(1, min(share, 8 * micro) + 1) if share % size == 0]
        closest = sorted(sorted(fits, key=lambda size: abs(size - micro))[:3])
        hint += f", or a micro-batch of {one_of(closest)} (--per_device_train_batch_size)"
    return message, hint
