"""A profiled step: what each rank did when, what layers took, what the memory of each stage held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.config.values.json_object import JsonObject
from harness.report.charts import BarChart, Bars
from harness.report.palette import BLUE, OF_KIND, OF_MEMORY, darker
from harness.report.profile.record import COMPUTING, KINDS, MEMORY, RankProfile, Span, StepProfile
from harness.report.profile.summary import largest_of_stage, seconds_by_kind, summary
from harness.report.profile.timeline import with_waits
from harness.report.run_files import RunFiles

MOST_RANKS = 64  # in the picture of a step; more cannot be told apart
TITLES = {"wait": "waits for another stage", "step": "optimizer step", "data": "reads data"}
OF_PASSES = ("forward", "recompute", "backward")
GIB, MIB = 2**30, 2**20


def step_charts(run: RunFiles, predicted: Sequence[Mapping[str, float]] = ()) -> list[BarChart]:
    """Return the charts of a run that was profiled; of another one, the sizes of its stages.

    `predicted`: bytes by part for each stage, where they are known.
    """
    shown = run.shown_profile
    if shown is None:
        return list(_stages(run))
    charts = [timeline(shown), layer_chart(run.profiles)]
    if any(rank.memory_bytes for rank in shown.ranks):
        charts.append(memory_chart(shown, predicted))
    return charts


def timeline(profile: StepProfile) -> BarChart:
    """Return ranks by time; what is left white is none of the kinds."""
    pieces: dict[tuple[str, int], list[tuple[str, Span]]] = {}
    chosen = _chosen(profile)
    ranks = [(rank, spans) for rank, spans in with_waits(profile) if rank.rank in chosen]
    for rank, spans in ranks:
        for span in spans:
            pieces.setdefault((span.kind, _round(profile, span)), []).append((_row(rank), span))
    hidden = len(profile.ranks) - len(ranks)
    missing = f" {hidden} further ranks are not shown." if hidden else ""
    return BarChart(
        key="timeline",
        title=f"Step {profile.step} on each rank",
        axis="milliseconds",
        rows=[_row(rank) for rank, _ in ranks],
        bars=list(_kinds(profile, pieces)),
        note=f"With each kind its share of a rank's time. Scroll to zoom, drag to move.{missing}",
    )


def _chosen(profile: StepProfile) -> set[int]:
    """Return the ranks to show: one of each stage, then others, as many as can be told apart."""
    by_place = sorted(profile.ranks, key=lambda rank: (rank.dp_rank, rank.tp_rank, rank.stage))
    return {rank.rank for rank in by_place[: max(MOST_RANKS, profile.pp_size)]}


def _row(rank: RankProfile) -> str:
    return f"rank {rank.rank}, stage {rank.stage}"


def _round(profile: StepProfile, span: Span) -> int:
    """Return which of its stage's chunks computes, counted from 0; for all else 0."""
    is_apart = profile.parts_per_stage > 1 and span.kind in COMPUTING and span.part is not None
    return span.part // profile.pp_size if is_apart and span.part is not None else 0


def _kinds(profile: StepProfile, pieces: Mapping[tuple[str, int], Sequence[tuple[str, Span]]]) -> Iterator[Bars]:
    """Yield what is of one kind, and of one round of the chunks: each goes to the next stage."""
    seconds = seconds_by_kind([profile])
    whole, stages, several = sum(seconds.values()), profile.pp_size, profile.parts_per_stage > 1
    for kind, number in sorted(pieces, key=lambda key: (KINDS.index(key[0]), key[1])):
        if kind not in OF_KIND:
            continue
        own = pieces[kind, number]
        of_kind = sum(span.seconds for at, found in pieces.items() if at[0] == kind for _, span in found)
        share = seconds[kind] / whole * sum(span.seconds for _, span in own) / of_kind
        name, color = TITLES.get(kind, kind), OF_KIND[kind]
        if several and kind in COMPUTING:
            name = f"{name}, parts {number * stages}-{(number + 1) * stages - 1}"
            color = darker(color, number)
        yield _spans(f"{name} {share:.0%}", color, kind, own, is_named=several)


def _spans(name: str, color: str, kind: str, pieces: Sequence[tuple[str, Span]], *, is_named: bool) -> Bars:
    """Return the pieces of a kind; `is_named`: whether to say of which model chunk they are."""

    def hover(span: Span) -> str:
        of = f", part {span.part}" if is_named and span.part is not None else ""
        of += "" if span.micro_batch is None else f", micro-batch {span.micro_batch}"
        what = f"waits in {span.name}" if kind == "wait" else span.name
        return f"{what}{of}<br>{span.start * 1e3:.2f} to {span.end * 1e3:.2f} ms: {span.seconds * 1e3:.2f} ms"

    is_numbered = kind in COMPUTING
    return Bars(
        name=name,
        color=color,
        rows=[row for row, _ in pieces],
        starts=[span.start * 1e3 for _, span in pieces],
        lengths=[span.seconds * 1e3 for _, span in pieces],
        hovers=[hover(span) for _, span in pieces],
        texts=["" if span.micro_batch is None else str(span.micro_batch) for _, span in pieces] if is_numbered else (),
    )


def layer_chart(profiles: Sequence[StepProfile]) -> BarChart:
    """Return the layers with the time of each pass, and the boundaries of the stages."""
    layers = summary(profiles)["layers"]
    rows = [str(layer["layer"]) for layer in layers]
    bases = [0.0] * len(rows)
    bars = []
    for kind in OF_PASSES:
        seconds = [layer[f"{kind}_seconds_per_micro_batch"] or 0.0 for layer in layers]
        if any(seconds):
            lengths = [value * 1e3 for value in seconds]
            hovers = [
                f"layer {layer['layer']}, {layer['name']}<br>stage {layer['stage']}<br>{kind}: {length:.2f} ms"
                for layer, length in zip(layers, lengths, strict=True)
            ]
            bars.append(Bars(name=kind, color=OF_KIND[kind], rows=rows, starts=bases, lengths=lengths, hovers=hovers))
            bases = [base + length for base, length in zip(bases, lengths, strict=True)]
    boundaries = profiles[-1].stage_boundaries
    return BarChart(
        key="layers",
        title="Layers and stage boundaries",
        axis="milliseconds for a micro-batch",
        rows=rows,
        bars=bars,
        is_upright=True,
        dividers=[(start, _owner(profiles[-1], chunk)) for chunk, start in enumerate(boundaries[:-1])],
    )


def _owner(profile: StepProfile, chunk: int) -> str:
    """Return the stage of a model chunk, and which chunk it is if stages have several."""
    stage = f"stage {profile.chunks.stage_of(chunk)}"
    return stage if profile.parts_per_stage == 1 else f"{stage}, part {chunk}"


def memory_chart(profile: StepProfile, predicted: Sequence[Mapping[str, float]]) -> BarChart:
    """Return for each stage the parts of the peak memory of the rank that needs most, and what was predicted."""
    rows: list[tuple[str, Mapping[str, float]]] = []
    for stage in range(profile.pp_size):
        rows.append((f"stage {stage}", largest_of_stage(profile, stage).memory_bytes))
        if stage < len(predicted):
            rows.append((f"stage {stage}, predicted", predicted[stage]))
    is_host = profile.device == "cpu"
    shown = [part for part in MEMORY if part != "other"] if is_host else MEMORY
    unit, name = _unit(max(sum(parts.get(part, 0) for part in shown) for _, parts in rows))
    bars = list(_memory_bars(rows, unit, name, hidden=() if is_host is False else ("other",)))
    process = max(parts.get("other", 0) for _, parts in rows) / MIB
    note = f"The process itself, Python with its libraries, takes {process:,.0f} MiB more." if is_host else ""
    return BarChart(
        key="memory", title="Peak memory by stage", axis=name, rows=[row for row, _ in rows], bars=bars, note=note
    )


def _memory_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], unit: float, name: str, hidden: Sequence[str]
) -> Iterator[Bars]:
    bases = [0.0] * len(rows)
    for part in MEMORY:
        lengths = [parts.get(part, 0) / unit for _, parts in rows]
        title = {"activations": "activations and buffers"}.get(part, part)
        yield Bars(
            name=title,
            color=OF_MEMORY[part],
            rows=[row for row, _ in rows],
            starts=bases,
            lengths=lengths,
            hovers=[f"{row}<br>{title}: {length:,.2f} {name}" for (row, _), length in zip(rows, lengths, strict=True)],
            is_hidden=part in hidden,
        )
        bases = [base + length for base, length in zip(bases, lengths, strict=True)]


def _unit(largest: float) -> tuple[float, str]:
    return (GIB, "GiB") if largest > GIB else (MIB, "MiB")


def _stages(run: RunFiles) -> Iterator[BarChart]:
    """Yield the parameters of each stage of a run that was not profiled, if its `run.json` has them."""
    stages = [stage for stage in run.about.get("stages") or [] if _is_whole(stage)]
    if stages:
        millions = [stage["parameters"] / 1e6 for stage in stages]
        kinds = [", ".join(f"{count} x {kind}" for kind, count in stage["kinds"].items()) for stage in stages]
        names = [f"stage {stage['stage']}" for stage in stages]
        bars = Bars(
            name="parameters",
            color=BLUE,
            rows=names,
            starts=[0.0] * len(names),
            lengths=millions,
            texts=[f"layers {stage['first']} to {stage['last']}" for stage in stages],
            hovers=[f"{kind}<br>{size:,.2f} million parameters" for kind, size in zip(kinds, millions, strict=True)],
        )
        note = "This run was not profiled: --profile N adds the timeline, layers and memory."
        yield BarChart(
            key="stages",
            title="Stages of the model",
            axis="million parameters on a rank",
            rows=names,
            bars=[bars],
            note=note,
        )


def _is_whole(stage: JsonObject) -> bool:
    return isinstance(stage, dict) and {"stage", "first", "last", "kinds", "parameters"} <= stage.keys()
