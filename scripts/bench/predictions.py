#!/usr/bin/env python
r"""Hold the planner's predictions against published measurements, and write the table of both.

    python scripts/bench/predictions.py published.csv --later scripts/bench/results/later_rows.csv \\
        --markdown docs/predictions.md

The CSV has a row for each measurement: the shape of the model, device, layout, batch, precision, and what was measured.
`--later` has rows that were found later.

A row is predicted as `ds-harness plan --like PROGRAM` predicts its layout: by nothing that a user of the planner does
not give (`published_systems.py`).
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from published_systems import Case, Unusable, case_of

from harness.planner.estimate import memory_of
from harness.planner.hardware import GIB
from harness.planner.step import step_seconds

LEAST_RANKED = 4  # layouts of a set whose order is compared
PAGE_TABLES = Path(__file__).resolve().parents[2] / "harness/planner/page/parts/predictions.md"


@dataclass(frozen=True)
class Compared:
    """One measurement beside its prediction, in seconds of a step."""

    case: Case
    predicted: float

    @property
    def error(self) -> float:
        """Of the predicted seconds, relative to the measured ones."""
        return self.predicted / self.case.seconds - 1


def compare(rows: Iterable[dict[str, str]]) -> tuple[list[Compared], dict[str, int]]:
    """Return the rows that can be predicted, and how many cannot, by reason."""
    found, left_out = [], defaultdict(int)
    for row in rows:
        try:
            case = case_of(row)
        except Unusable as reason:
            left_out[str(reason)] += 1
            continue
        found.append(Compared(case, step_seconds(case.hardware, case.workload, case.strategy).total))
    return found, dict(left_out)


def memory_errors(found: Sequence[Compared]) -> Iterator[tuple[str, list[float]]]:
    """Yield the systems whose peak memory was measured, and the errors of the stage that needs most."""
    groups = defaultdict(list)
    for case in (one.case for one in found):
        if case.peak_gib:
            peak = max(stage.total for stage in memory_of(case.workload, case.strategy)) / GIB
            groups[case.system].append(peak / case.peak_gib - 1)
    yield from sorted(groups.items())


def memory_table(found: Sequence[Compared]) -> Iterator[str]:
    """Yield a Markdown table of the errors of peak memory."""
    yield "\n| peak memory | rows | mean error | mean signed |"
    yield "|---|---|---|---|"
    for system, errors in memory_errors(found):
        size = statistics.fmean(abs(error) for error in errors)
        yield f"| {system} | {len(errors)} | {size:.1%} | {statistics.fmean(errors):+.1%} |"


def mean_error(found: Sequence[Compared]) -> float:
    """Return the mean of the errors' sizes."""
    return statistics.fmean(abs(one.error) for one in found)


def by(found: Sequence[Compared], key: Callable[[Compared], object]) -> list[tuple[str, list[Compared]]]:
    """Return the comparisons in groups, the worst mean first."""
    groups = defaultdict(list)
    for one in found:
        groups[str(key(one))].append(one)
    return sorted(groups.items(), key=lambda item: -mean_error(item[1]))


def summary(found: Sequence[Compared]) -> Iterator[tuple[str, Sequence[Compared]]]:
    """Yield all rows, and those of one node and of several."""
    yield "all", found
    largest = max({one.case.system for one in found}, key=lambda name: sum(one.case.system == name for one in found))
    for words, several in (("one node", False), ("several nodes", True)):
        part = [one for one in found if one.case.is_multi_node == several]
        if part:
            yield words, part
            yield f"{words}, without {largest}", [one for one in part if one.case.system != largest]


def table(title: str, groups: Iterable[tuple[str, Sequence[Compared]]]) -> Iterator[str]:
    """Yield a Markdown table of mean, median, worst and signed errors."""
    yield f"\n| {title} | rows | mean error | median | worst | mean signed |"
    yield "|---|---|---|---|---|---|"
    for name, part in groups:
        sizes = [abs(one.error) for one in part]
        signed = statistics.fmean(one.error for one in part)
        yield (
            f"| {name} | {len(part):,} | {statistics.fmean(sizes):.1%} | {statistics.median(sizes):.1%} | "
            f"{max(sizes):.1%} | {signed:+.1%} |"
        )


def rankings(found: Sequence[Compared]) -> Iterator[tuple[str, float]]:
    """Yield the source of each set of layouts that compete, and how alike predicted and measured order are (Spearman).

    They compete where model, device, ranks, batch, length and precision are the same; sets of less than four tell
    nothing.
    """
    sets: dict[tuple[object, ...], list[Compared]] = defaultdict(list)
    for one in found:
        case, work, layout = one.case, one.case.workload, one.case.strategy
        sets[
            (
                case.system,
                case.model,
                case.device,
                layout.world_size,
                layout.global_batch,
                work.sequence,
                work.precision,
            )
        ].append(one)
    for key, part in sets.items():
        if len(part) >= LEAST_RANKED:
            orders = _ranks([one.predicted for one in part]), _ranks([one.case.seconds for one in part])
            if all(len(set(order)) > 1 for order in orders):  # equal ones have no order
                yield str(key[0]), statistics.correlation(*orders)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value in their order; equal ones share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def ranking_table(found: Sequence[Compared]) -> Iterator[str]:
    """Yield a Markdown table of the rank correlations, of all sets and of all but those of the largest source."""
    ranked = list(rankings(found))
    largest = max({one.case.system for one in found}, key=lambda name: sum(x.case.system == name for x in found))
    yield "\n| order of competing layouts | sets | mean Spearman |"
    yield "|---|---|---|"
    for words, part in (
        ("all sets", [value for _, value in ranked]),
        (f"without {largest}", [value for name, value in ranked if name != largest]),
    ):
        if part:
            yield f"| {words} | {len(part)} | {statistics.fmean(part):.2f} |"


def source_table(found: Sequence[Compared]) -> Iterator[str]:
    """Yield a Markdown table with a line for each source: what it is predicted like, on one node and on several."""
    yield "\n| source | `--like` | rows on one node | mean error | signed | rows on several | mean error | signed |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, part in by(found, lambda one: one.case.system):
        cells = []
        for several in (False, True):
            errors = [one.error for one in part if one.case.is_multi_node == several]
            size = f"{statistics.fmean(map(abs, errors)):.1%}" if errors else "-"
            cells += [f"{len(errors):,}", size, f"{statistics.fmean(errors):+.1%}" if errors else "-"]
        yield f"| {name} | {part[0].case.like} | {' | '.join(cells)} |"


def rows_table(found: Sequence[Compared], count: int) -> Iterator[str]:
    """Yield a Markdown table of single rows, the worst first."""
    yield "\n| system | model | device | layout | batch | measured s | predicted s | error |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in sorted(found, key=lambda one: -abs(one.error))[:count]:
        case, strategy = one.case, one.case.strategy
        layout = f"{strategy.world_size}: pp{strategy.pp_size} tp{strategy.tp_size} dp{strategy.dp_size}"
        layout += f" ep{strategy.ep_size}" if strategy.ep_size > 1 else ""
        layout += f" ZeRO-{strategy.zero_stage}" + (" recomputed" if strategy.recompute == "full" else "")
        yield (
            f"| {case.system} | {case.model} | {case.device} | {layout} | {strategy.micro_batch} x "
            f"{strategy.accumulation} | {case.seconds:.4g} | {one.predicted:.4g} | {one.error:+.1%} |"
        )


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument(
        "--markdown", type=Path, help="write the page of the documentation, and the planner page's tables"
    )
    parser.add_argument("--later", type=Path, help="the same, of measurements that were found afterwards")
    parser.add_argument("--worst", type=int, default=20, help="single rows to list")
    args = parser.parse_args()
    with args.csv.open(encoding="utf-8", newline="") as file:
        found, left_out = compare(csv.DictReader(file))
    sources = "\n".join(source_table(found)) + "\n"
    if args.later is not None:
        with args.later.open(encoding="utf-8", newline="") as file:
            later, _ = compare(csv.DictReader(file))
        sources += "\nMeasurements that were found later, not among those rows:\n"
        sources += "\n".join(rows_table(later, len(later))) + "\n"
    lines = [
        *table("nodes", summary(found)),
        *ranking_table(found),
        *table("`--like`", by(found, lambda one: one.case.like)),
        *table("device", by(found, lambda one: one.case.device)),
        *table("layout", by(found, lambda one: one.case.kind)),
        *memory_table(found),
        "\nThe worst rows:",
        *rows_table(found, args.worst),
        "\nLeft out: " + "; ".join(f"{count} rows, {reason}" for reason, count in sorted(left_out.items())) + ".",
    ]
    text = "\n".join(lines) + "\n"
    if args.markdown is None:
        print(sources + text)
        return
    page = args.markdown.read_text(encoding="utf-8")
    for name, made in (("sources", sources), ("tables", text)):
        head, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- end of {name} -->\n")
        page = head + mark + made + end + tail
    args.markdown.write_text(page, encoding="utf-8")
    PAGE_TABLES.write_text(sources.lstrip() + text, encoding="utf-8")


if __name__ == "__main__":
    main()
