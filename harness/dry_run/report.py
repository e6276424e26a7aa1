"""Write the report on a rank as text or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from harness.config.values.json_object import JsonObject
from harness.dry_run.rank import DryRun, RankReport
from harness.dry_run.timeline import seconds_by_cause

NOT_CHECKED = (
    "the values of the weights and the data: none are read",
    "the other ranks, the network and the devices",
    "that the model split over tensor-parallel ranks computes the same as the whole one (a run does: --verify_plan)",
)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def as_json(plan: DryRun, report: RankReport) -> JsonObject:
    """Return the report as JSON; programs rely on its keys."""
    memory = report.memory
    place = report.groups.coordinate
    return {
        "rank": report.groups.rank,
        "world_size": plan.layout.world_size,
        "layout": plan.layout.sizes(),
        "coordinate": {"pipeline": place.stage, "data": place.dp_rank, "tensor": place.tp_rank},
        "layers": {**_layers(report), "kinds": report.kinds},
        "parameters": report.elements,
        "precision": plan.resolved.precision,
        "zero_stage": plan.resolved.zero_stage,
        "micro_batch": plan.resolved.micro_batch,
        "gradient_accumulation_steps": plan.resolved.accumulation,
        "block_size": plan.block_size,
        "memory_bytes": None if memory is None else asdict(memory),
        "messages": [
            {**asdict(message), "count": traffic.count, "bytes": traffic.size}
            for message, traffic in report.messages.items()
        ],
        **({} if report.timeline is None else {"step_seconds": seconds_by_cause(report.timeline)}),
        "not_checked": _not_checked(report),
    }


def as_text(plan: DryRun, report: RankReport) -> str:
    """Return the report for a terminal."""
    resolved = plan.resolved
    groups = report.groups
    kinds = ", ".join(name if n == 1 else f"{n} x {name}" for name, n in report.kinds.items())
    layers = " and ".join(f"{first}-{last}" for first, last in report.chunks.values())
    batch = f"{resolved.accumulation} micro-batches of {plan.rows} x {plan.block_size} tokens"
    lines = [
        f"rank {groups.rank} of {plan.layout.world_size} ({plan.layout}): {groups.coordinate}",
        f"  layers {layers} ({kinds}), {report.elements:,} parameters",
        f"  {resolved.precision}, ZeRO stage {resolved.zero_stage}, {batch} a step",
        *_memory_lines(report),
        *_message_lines(report),
        *_time_lines(report),
        *(f"  not checked: {text}" for text in _not_checked(report)),
    ]
    return "\n".join(lines)


def _layers(report: RankReport) -> JsonObject:
    """Return the first and last layer, or those of each model chunk if there are several."""
    chunks = [{"chunk": chunk, "first": first, "last": last} for chunk, (first, last) in report.chunks.items()]
    return {"chunks": chunks} if len(chunks) > 1 else {"first": chunks[0]["first"], "last": chunks[0]["last"]}


def _memory_lines(report: RankReport) -> list[str]:
    memory = report.memory
    if memory is None:
        return []
    kept = f"{spell(memory.activations)} a micro-batch x {memory.in_flight:g} in flight"
    rows = {
        "parameters": _by_dtype(memory.parameters),
        "gradients": _by_dtype(memory.gradients),
        "optimizer": _by_dtype(memory.optimizer),
        "activations": f"{spell(memory.activations * memory.in_flight)} ({kept})",
        "buffers": spell(memory.buffers),
        "peak of a step": spell(memory.peak),
        **({"in host memory": spell(memory.host)} if memory.host else {}),
    }
    return ["  memory", *(f"    {name:<16}{text}" for name, text in rows.items())]


def _message_lines(report: RankReport) -> list[str]:
    lines = [
        f"    {message.group + ' (' + str(message.ranks) + ')':<16}{message.operation:<15}{traffic.count:>8,}"
        f"{spell(traffic.size):>14}"
        for message, traffic in report.messages.items()
    ]
    return ["  messages a step: group (ranks), operation, count, bytes", *(lines or ["    none"])]


def _time_lines(report: RankReport) -> list[str]:
    if report.timeline is None:
        return []
    seconds = seconds_by_cause(report.timeline)
    rows = {"predicted step": sum(seconds.values()), **{f"  {cause}": seconds[cause] for cause in seconds}}
    return [f"  {name:<36}{1e3 * each:>12,.3f} ms" for name, each in rows.items()]


def _not_checked(report: RankReport) -> list[str]:
    return [*report.notes, *NOT_CHECKED]


def _by_dtype(sizes: Mapping[str, int]) -> str:
    total = spell(sum(sizes.values()))
    return f"{total} ({', '.join(f'{spell(size)} in {name}' for name, size in sizes.items())})" if sizes else total


def spell(size: float) -> str:
    """Return bytes as text in the largest unit that fits, as `1.50 GiB`."""
    unit = 0
    while size >= 1024 and unit + 1 < len(UNITS):
        size = size / 1024
        unit += 1
    return f"{size:,.2f} {UNITS[unit]}" if unit else f"{size:,.0f} B"
