"""Charts of what a run was trained on: lengths of its conversations, and what is learnt of each source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from harness.config.values.json_object import JsonObject
from harness.report.charts import BarChart, Bars
from harness.report.palette import BLUE, PALE
from harness.report.run_files import RunFiles


def data_charts(run: RunFiles) -> list[BarChart]:
    """Return the charts of a run whose `run.json` says what its data is made of."""
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
        note="Tokens of each conversation, as far as it fits into a sample.",
    )


def _sources(data: JsonObject) -> Iterator[BarChart]:
    found = data.get("sources")
    whole = [row for row in found if _is_source(row)] if isinstance(found, list) else []
    if not whole:
        return
    rows = [str(row.get("name") or "training data") for row in whole]
    tokens, learnt = ([row[name] / 1e6 for row in whole] for name in ("tokens", "learnt"))
    parts = {"learnt": (learnt, [0.0] * len(rows), BLUE)}
    others = [all_of - some for all_of, some in zip(tokens, learnt, strict=True)]
    parts["not learnt"] = (others, learnt, PALE)
    bars = [
        Bars(
            name=name,
            color=color,
            rows=rows,
            starts=starts,
            lengths=lengths,
            hovers=[
                f"{row['samples']:,} samples, {row['learnt']:,} of {row['tokens']:,} tokens are learnt" for row in whole
            ],
        )
        for name, (lengths, starts, color) in parts.items()
    ]
    yield BarChart(key="sources", title="Tokens of the sources", axis="million tokens", rows=rows, bars=bars)


def _is_source(row: object) -> bool:
    return isinstance(row, dict) and bool(_numbers([row.get(name) for name in ("samples", "tokens", "learnt")]))


def _numbers(values: object) -> Sequence[int]:
    """Return a list of counts; nothing if it is none."""
    is_list = isinstance(values, list) and all(isinstance(each, int) and 0 <= each < 2**63 for each in values)
    return values if isinstance(values, list) and is_list else ()
