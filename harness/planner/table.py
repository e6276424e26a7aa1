"""Rows as they stand in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.planner.estimate import Estimate
from harness.planner.hardware import GIB, HEADROOM
from harness.planner.search import Found
from harness.planner.sensitivity import MoreDevices, MoreMemory
from harness.planner.workload import Strategy
from harness.wording import counted

HEADER = (
    "",
    "pp",
    "tp",
    "dp",
    "ZeRO",
    "micro",
    "accum",
    "ckpt",
    "schedule",
    "offload",
    "GiB",
    "step s",
    "bubble",
    "tokens/s",
    "MFU",
)


def plan_lines(found: Found, top: int, devices: MoreDevices | None, memory: MoreMemory | None) -> Iterator[str]:
    """Yield the table of the best layouts, the reasons that others fall out, and what more would bring."""
    best = found.fitting[0]
    yield from _table(found.fitting[:top])
    more = len(found.fitting) - top
    if more > 0:
        yield f"and {counted(more, 'slower layout')}: --top shows more"
    yield f"\n{counted(found.tried, 'layout')} tried, {len(found.fitting):,} fit {best.hardware.name}"
    for reason, count in found.reasons.most_common():
        yield f"  {count:>6,}  {reason}"
    yield ""
    if devices is None:
        yield "more devices: none of the next sizes is faster with this global batch"
    else:
        gain = devices.tokens_per_second / best.tokens_per_second - 1
        added = devices.devices - best.strategy.world_size
        yield f"{counted(added, 'more device')}: {gain:+.1%} tokens/s"
    if memory is None:
        yield "more memory: no faster layout needs it"
    else:
        gain = memory.tokens_per_second / best.tokens_per_second - 1
        yield f"{memory.gib:.1f} GiB more on each device: {gain:+.1%} tokens/s"


def _table(rows: Sequence[Estimate]) -> Iterator[str]:
    cells = [HEADER, *(_cells(number, one) for number, one in enumerate(rows, 1))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER))]
    for row in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _cells(number: int, one: Estimate) -> tuple[str, ...]:
    row, strategy = one.row(), one.strategy
    return (
        str(number),
        str(strategy.pp_size),
        _tensor(strategy),
        str(strategy.dp_size),
        str(strategy.zero_stage),
        str(strategy.micro_batch),
        str(strategy.accumulation),
        "yes" if row["activation_checkpointing"] else "no",
        strategy.schedule_name if strategy.pp_size > 1 else "-",
        {"none": "no", "optimizer": "states", "optimizer+parameters": "all"}[strategy.offload],
        f"{row['memory_gib']['max']:.1f}",
        f"{row['step_seconds']['total']:.3g}",
        f"{row['bubble_fraction']:.0%}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['mfu']:.1%}",
    )


def _tensor(strategy: Strategy) -> str:
    """Return the tensor-parallel size, with `ep` where ranks hold whole experts and `sp` where they share sequences."""
    more = " ep" * (strategy.ep_size > 1) + " sp" * strategy.sequence_parallel
    return f"{strategy.tp_size}{more}"


def estimate_lines(one: Estimate) -> Iterator[str]:
    """Yield what one config needs and does."""
    strategy, row = one.strategy, one.row()
    limit = row["memory_gib"]["limit"]
    yield (
        f"pipeline {strategy.pp_size} x tensor {strategy.tp_size} x data {strategy.dp_size} on {one.hardware.name}, "
        f"{one.workload.precision}, ZeRO-{strategy.zero_stage}, {strategy.accumulation} x {strategy.micro_batch} "
        f"samples of {one.workload.sequence:,} tokens on each data-parallel rank"
    )
    yield f"\nGiB on each rank, of {limit:.1f}"
    parts = list(row["memory_gib"]["stages"][0])
    yield "stage  " + "  ".join(f"{part:>11}" for part in parts)
    for index, stage in enumerate(row["memory_gib"]["stages"]):
        yield f"{index:>5}  " + "  ".join(f"{stage[part]:>11.2f}" for part in parts)
    if host := one.host_bytes:
        yield f"and {host / GIB:.2f} GiB of the host's memory for each rank"
    yield "\nseconds of a step"
    for part, seconds in row["step_seconds"].items():
        yield f"  {part:<10} {seconds:>10.4f}  {seconds / row['step_seconds']['total']:>6.1%}"
    yield (
        f"\n{row['tokens_per_second']:,.0f} tokens/s, {row['tokens_per_second_per_gpu']:,.0f} on each rank, "
        f"{row['model_tflops_per_gpu']:.3g} TFLOP/s on each rank, MFU {row['mfu']:.1%}"
    )
    if one.fits and not one.has_room:
        yield (
            f"fits closely: {one.peak_bytes / GIB:.1f} GiB of {limit:.1f}; `ds-harness plan` keeps {HEADROOM:.0%} "
            "free, for what a prediction may lack"
        )
    if not one.fits:
        host_limit = one.hardware.host_memory_bytes / GIB
        yield (
            f"does not fit: a rank needs {one.peak_bytes / GIB:.1f} GiB of {limit:.1f}, "
            f"and {one.host_bytes / GIB:.1f} of {host_limit:.1f} on its host"
        )
