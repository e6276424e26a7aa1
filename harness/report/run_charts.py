"""The charts of runs: curves over their steps, their data, and the time and memory of a step by purpose."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from harness.config.values.json_object import JsonObject
from harness.report.charts import (
    BLUE,
    OF_KIND,
    OF_MEMORY,
    PALE,
    BarChart,
    Bars,
    ChartMark,
    Line,
    LineChart,
    darker,
    of_run,
)
from harness.report.profile.record import COMPUTING, KINDS, MEMORY, RankProfile, Span, StepProfile
from harness.report.profile.summary import largest_of_stage, seconds_by_kind, summary
from harness.report.profile.timeline import with_waits
from harness.report.run_files import RunFiles

MOST_POINTS = 4000  # per curve; a screen does not have more columns
Point = tuple[float, float | None]
SHOWN = {
    "loss": "loss",
    "grad_norm": "gradient norm before clipping",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
}
"""Key in `metrics.jsonl` -> title of its curve."""
MOST_RANKS = 64  # in the chart of a step; more rows could not be told apart
TITLES = {"wait": "waits for another stage", "step": "optimizer step", "data": "reads data"}
OF_PASSES = ("forward", "recompute", "backward")
GIB = 2**30
MIB = 2**20


def curves(runs: Sequence[RunFiles]) -> list[LineChart]:
    """Return a chart for each curve that any run has."""
    marks = [mark for run in runs for mark in marks_of(run, with_name=len(runs) > 1)]
    charts = []
    for key, title in SHOWN.items():
        lines = [line for number, run in enumerate(runs) for line in _lines(run, key, of_run(number), len(runs) > 1)]
        if lines:
            charts.append(LineChart(key=key, title=title, lines=lines, marks=marks))
    return charts


def marks_of(run: RunFiles, *, with_name: bool = False) -> list[ChartMark]:
    """Return the events of a run by step: checkpoints, restarts, rollbacks."""
    ending = f" ({run.name})" if with_name else ""
    found = [
        ChartMark(x=step, kind="checkpoint", text=f"checkpoint at step {step}{ending}") for step in run.checkpoints
    ]
    found += [
        ChartMark(
            x=row["step"],
            kind="restart",
            text=f"restart after a failure in step {row['step']}: {row.get('cause')}{ending}",
        )
        for row in run.restarts
    ]
    found += [
        ChartMark(x=step, kind="rollback", text=f"rollback: {samples} samples are left out before step {step}{ending}")
        for step, samples in _left_out(run)
    ]
    return sorted(found, key=lambda mark: mark.x)


def _left_out(run: RunFiles) -> Iterator[tuple[int, int]]:
    """Yield the steps before which a rollback has left out samples, and how many.

    Between two such steps, more samples were consumed than one step takes.
    """
    batch = run.config.get("train_batch_size")
    counted = [(row["step"], row.get("consumed_samples")) for row in run.steps]
    for (step, samples), (next_step, next_samples) in pairwise(counted):
        if isinstance(batch, int) and isinstance(samples, int) and isinstance(next_samples, int):
            more = next_samples - samples - batch * (next_step - step)
            if more > 0 and next_step == step + 1:
                yield next_step, more


def _lines(run: RunFiles, key: str, color: str, is_named: bool) -> Iterator[Line]:
    values = thinned([(row["step"], _number(row.get(key))) for row in run.steps])
    if any(value is not None for _, value in values):
        x, y = zip(*values, strict=True)
        yield Line(name=run.name if is_named else "training", color=color, x=x, y=y)
    for number, name in enumerate(_sources_of(run) if key == "loss" else (), start=1):
        points = [(row["step"], _number(_of_sources(row).get(name))) for row in run.steps]
        x, y = zip(*thinned([point for point in points if point[1] is not None]), strict=True)
        label, own = (f"{run.name}, {name}", color) if is_named else (name, of_run(number))
        yield Line(name=label, color=own, x=x, y=y)
    for number, (name, title) in enumerate(_evaluations(run, key).items()):
        points = [(row["step"], value) for row in run.evaluations if (value := _number(row.get(name))) is not None]
        if points:
            x, y = zip(*points, strict=True)
            label, own = (f"{run.name}, {title}", color) if is_named else (title, of_run(number))
            yield Line(name=label, color=own, x=x, y=y, is_points=True)


def _of_sources(row: JsonObject) -> JsonObject:
    """Return the losses of a step by data source."""
    found = row.get("source_losses")
    return found if isinstance(found, dict) else {}


def _sources_of(run: RunFiles) -> list[str]:
    """Return the names of the sources that have a loss in some step."""
    named = ((name, value) for row in run.steps for name, value in _of_sources(row).items())
    return list(dict.fromkeys(name for name, value in named if _number(value) is not None))


def _evaluations(run: RunFiles, key: str) -> dict[str, str]:
    """Return key in `evaluations.jsonl` -> title of its points, for the one or for each named evaluation set."""
    names = dict.fromkeys(name for row in run.evaluations for name in row)
    named = {name: match[1] for name in names if (match := re.fullmatch(rf"eval_(.+)_{key}", name))}
    return {f"eval_{key}": "evaluation"} | {name: f"evaluation on {title}" for name, title in named.items()}


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Reduce a curve to about `MOST_POINTS` points: the lowest and highest of each interval, and its gap if any."""
    stretch = 2 * -(-len(points) // MOST_POINTS)
    if len(points) <= MOST_POINTS:
        return points
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        there = sorted((point for point in part if point[1] is not None), key=lambda point: point[1] or 0.0)
        gaps = [point for point in part if point[1] is None]
        kept += sorted({*there[:1], *there[-1:], *gaps[:1]})
    return kept


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < float("inf") else None  # type: ignore[arg-type]


def data_charts(run: RunFiles) -> list[BarChart]:
    """Return the charts of a run's data, as far as its `run.json` describes it."""
    data = run.about.get("data")
    return [] if not isinstance(data, dict) else [*_lengths(data), *_sources(data)]


def _lengths(data: JsonObject) -> Iterator[BarChart]:
    found = data.get("lengths")
    edges, counts = (_numbers(found.get(name)) for name in ("edges", "counts")) if isinstance(found, dict) else ((), ())
    if not counts or len(edges) != len(counts) + 1:
        return
    rows = [f"{first:,} to {stop - 1:,}" if stop - first > 1 else f"{first:,}" for first, stop in pairwise(edges)]
    yield BarChart(
        key="lengths",
        title="Lengths of the conversations",
        axis="conversations",
        across="tokens of a conversation",
        rows=rows,
        bars=[
            Bars(
                name="conversations",
                color=BLUE,
                rows=rows,
                starts=[0.0] * len(rows),
                lengths=counts,
                hovers=[f"{row} tokens: {count:,} conversations" for row, count in zip(rows, counts, strict=True)],
            )
        ],
        is_upright=True,
        note="Tokens of each conversation after truncation to a sample.",
    )


def _sources(data: JsonObject) -> Iterator[BarChart]:
    found = data.get("sources")
    whole = [row for row in found if _is_source(row)] if isinstance(found, list) else []
    if not whole:
        return
    rows = [str(row.get("name") or "training data") for row in whole]
    tokens, learnt = ([row[name] / 1e6 for row in whole] for name in ("tokens", "learnt"))
    parts = {"in the loss": (learnt, [0.0] * len(rows), BLUE)}
    others = [all_of - some for all_of, some in zip(tokens, learnt, strict=True)]
    parts["not in the loss"] = (others, learnt, PALE)
    bars = [
        Bars(
            name=name,
            color=color,
            rows=rows,
            starts=starts,
            lengths=lengths,
            hovers=[
                f"{row['samples']:,} samples, {row['learnt']:,} of {row['tokens']:,} tokens are in the loss"
                for row in whole
            ],
        )
        for name, (lengths, starts, color) in parts.items()
    ]
    yield BarChart(key="sources", title="Tokens of the sources", axis="million tokens", rows=rows, bars=bars)


def _is_source(row: object) -> bool:
    return isinstance(row, dict) and bool(_numbers([row.get(name) for name in ("samples", "tokens", "learnt")]))


def _numbers(values: object) -> Sequence[int]:
    """Return `values` if they are a list of counts, else an empty sequence."""
    is_list = isinstance(values, list) and all(isinstance(each, int) and 0 <= each < 2**63 for each in values)
    return values if isinstance(values, list) and is_list else ()


def step_charts(run: RunFiles, predicted: Sequence[Mapping[str, float]] = ()) -> list[BarChart]:
    """Return the charts of a profiled step, or, if the run was not profiled, of the sizes of its stages.

    Args:
        predicted: predicted bytes by part for each stage, if known.
    """
    shown = run.shown_profile
    if shown is None:
        return list(_stages(run))
    charts = [timeline(shown), layer_chart(run.profiles)]
    if any(rank.memory_bytes for rank in shown.ranks):
        charts.append(memory_chart(shown, predicted))
    return charts


def timeline(profile: StepProfile) -> BarChart:
    """Return a row for each rank over the time of the step; white is time that belongs to no kind of work."""
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
        note=f"The legend shows each kind's share of a rank's time. Scroll to zoom, drag to move.{missing}",
    )


def _chosen(profile: StepProfile) -> set[int]:
    """Return the ranks to show: one of each stage, then others, up to `MOST_RANKS`."""
    by_place = sorted(profile.ranks, key=lambda rank: (rank.dp_rank, rank.tp_rank, rank.stage))
    return {rank.rank for rank in by_place[: max(MOST_RANKS, profile.pp_size)]}


def _row(rank: RankProfile) -> str:
    return f"rank {rank.rank}, stage {rank.stage}"


def _round(profile: StepProfile, span: Span) -> int:
    """Return the index of the computing chunk among those of its stage; 0 if a stage has one or nothing computes."""
    is_apart = profile.chunks_per_stage > 1 and span.kind in COMPUTING and span.chunk is not None
    return span.chunk // profile.pp_size if is_apart and span.chunk is not None else 0


def _kinds(profile: StepProfile, pieces: Mapping[tuple[str, int], Sequence[tuple[str, Span]]]) -> Iterator[Bars]:
    """Yield the bars of each kind of work; computing has one for each index of `_round`, in darker colours."""
    seconds = seconds_by_kind([profile])
    whole = sum(seconds.values())
    stages = profile.pp_size
    several = profile.chunks_per_stage > 1
    for kind, number in sorted(pieces, key=lambda key: (KINDS.index(key[0]), key[1])):
        if kind not in OF_KIND:
            continue
        own = pieces[kind, number]
        of_kind = sum(span.seconds for at, found in pieces.items() if at[0] == kind for _, span in found)
        share = seconds[kind] / whole * sum(span.seconds for _, span in own) / of_kind
        name = TITLES.get(kind, kind)
        color = OF_KIND[kind]
        if several and kind in COMPUTING:
            name = f"{name}, chunks {number * stages}-{(number + 1) * stages - 1}"
            color = darker(color, number)
        yield _spans(f"{name} {share:.0%}", color, kind, own, is_named=several)


def _spans(name: str, color: str, kind: str, pieces: Sequence[tuple[str, Span]], *, is_named: bool) -> Bars:
    """Return the bars of one kind; `is_named`: name their model chunk in the hover text."""

    def hover(span: Span) -> str:
        of = f", chunk {span.chunk}" if is_named and span.chunk is not None else ""
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
    """Return a column for each layer with the time of each pass, and the stage boundaries."""
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
        across="layer",
        rows=rows,
        bars=bars,
        is_upright=True,
        dividers=[(start, _owner(profiles[-1], chunk)) for chunk, start in enumerate(boundaries[:-1])],
    )


def _owner(profile: StepProfile, chunk: int) -> str:
    """Return the stage of a model chunk as text, with the chunk if stages have several."""
    stage = f"stage {profile.chunks.stage_of(chunk)}"
    return stage if profile.chunks_per_stage == 1 else f"{stage}, chunk {chunk}"


def memory_chart(profile: StepProfile, predicted: Sequence[Mapping[str, float]]) -> BarChart:
    """Return a row for each stage: the peak memory, by part, of the rank with the highest peak; then the prediction."""
    rows: list[tuple[str, Mapping[str, float]]] = []
    for stage in range(profile.pp_size):
        rows.append((f"stage {stage}", largest_of_stage(profile, stage).memory_bytes))
        if stage < len(predicted):
            rows.append((f"stage {stage}, predicted", predicted[stage]))
    is_host = profile.device == "cpu"
    shown = [part for part in MEMORY if part != "other"] if is_host else MEMORY
    largest = max(sum(parts.get(part, 0) for part in shown) for _, parts in rows)
    unit, name = (GIB, "GiB") if largest > GIB else (MIB, "MiB")
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


def _stages(run: RunFiles) -> Iterator[BarChart]:
    """Yield a chart of the parameters of each stage, if `run.json` has them."""
    listed = run.about.get("stages")
    stages = [stage for stage in listed if _is_whole(stage)] if isinstance(listed, list) else []
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
