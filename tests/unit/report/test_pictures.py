"""Charts of a profiled step from numbers made by hand, and what plotly's JSON makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.report.charts import BarChart, Bars, ChartMark, Line, LineChart
from harness.report.plotly_figures import FEW_STEPS, MOST_SHOWN_MARKS, figure
from harness.report.profile.record import RankProfile, StepProfile
from harness.report.run_charts import MOST_RANKS, layer_chart, memory_chart, step_charts, timeline
from harness.report.run_files import RunFiles
from tests.unit.report.profile.made import MEMORY, profile, several_chunks

MIB = 2**20


def bars_of(chart: BarChart) -> dict[str, Bars]:
    return {bars.name.split(" ")[0]: bars for bars in chart.bars}


def run(**about: Any) -> RunFiles:
    return RunFiles(name="run", folder=Path("run"), about=about, steps=[])


def test_a_timeline_has_each_rank_and_the_share_of_each_kind() -> None:
    chart = timeline(profile())
    assert chart.rows == ["rank 0, stage 0", "rank 1, stage 1"]
    forward = bars_of(chart)["forward"]
    assert forward.starts[:2] == [500.0, 1600.0] and forward.lengths[:2] == pytest.approx([1000.0, 1000.0])
    assert forward.texts == ["0", "1", "0", "1"] and forward.rows[2:] == ["rank 1, stage 1"] * 2
    assert forward.hovers[0] == "ForwardPass, micro-batch 0<br>500.00 to 1500.00 ms: 1000.00 ms"
    shares = [int(bars.name.rsplit(" ", 1)[1].rstrip("%")) for bars in chart.bars]
    assert 97 <= sum(shares) <= 103  # rounded, of all the time that there is
    assert "further ranks" not in chart.note


def test_the_chunks_of_a_stage_have_shades_of_one_colour_and_say_which_they_are() -> None:
    chart = timeline(several_chunks())
    passes = {bars.name.rsplit(" ", 1)[0]: bars for bars in chart.bars if "chunks" in bars.name}
    assert list(passes) == [f"{kind}, chunks {parts}" for kind in ("forward", "backward") for parts in ("0-1", "2-3")]
    assert len({bars.color for bars in passes.values()}) == 4
    assert passes["forward, chunks 2-3"].rows == ["rank 0, stage 0", "rank 1, stage 1"]
    assert passes["forward, chunks 2-3"].starts == [3500.0, 2300.0]
    assert passes["backward, chunks 0-1"].hovers[0].startswith("BackwardPass, chunk 0, micro-batch 0<br>")
    # 8 s of 23.9 that two ranks have
    assert [bars.name.rsplit(" ", 1)[1] for bars in passes.values()] == ["8%", "8%", "17%", "17%"]
    owners = ["stage 0, chunk 0", "stage 1, chunk 1", "stage 1, chunk 2", "stage 0, chunk 3"]
    assert [text for _, text in layer_chart([several_chunks()]).dividers] == owners


def many(count: int) -> StepProfile:
    """A step of two stages and many data-parallel ranks."""
    first, second = profile().ranks
    ranks: list[RankProfile] = []
    for dp_rank in range(count // 2):
        ranks += [
            replace(first, rank=2 * dp_rank, dp_rank=dp_rank),
            replace(second, rank=2 * dp_rank + 1, dp_rank=dp_rank),
        ]
    return replace(profile(), ranks=ranks)


def test_of_many_ranks_as_many_are_shown_as_can_be_told_apart() -> None:
    chart = timeline(many(MOST_RANKS + 6))
    assert len(chart.rows) == MOST_RANKS and chart.note.endswith(" 6 further ranks are not shown.")
    assert len(timeline(many(MOST_RANKS)).rows) == MOST_RANKS


def test_layers_stand_on_each_other_by_their_passes() -> None:
    chart = layer_chart([profile()])
    assert chart.is_upright and chart.dividers == [(0, "stage 0"), (1, "stage 1")]
    found = bars_of(chart)
    assert found["forward"].lengths[0] == pytest.approx(1000.0) and found["recompute"].lengths[0] == pytest.approx(
        500.0
    )
    assert found["recompute"].starts[0] == pytest.approx(1000.0) and found["backward"].starts[0] == pytest.approx(
        1500.0
    )
    assert found["backward"].lengths[0] == pytest.approx(500.0)  # two pieces, before and after the recomputation


def test_memory_stands_beside_its_prediction() -> None:
    gpu = replace(profile(), device="cuda")
    chart = memory_chart(gpu, [{"parameters": 6.0 * MIB}])
    assert chart.rows == ["stage 0", "stage 0, predicted", "stage 1"] and chart.note == ""
    found = bars_of(chart)
    assert found["parameters"].lengths == [MEMORY["parameters"] / MIB, 6.0, MEMORY["parameters"] / MIB]
    assert not found["other"].is_hidden


def test_on_a_cpu_the_process_itself_is_said_and_not_drawn() -> None:
    chart = memory_chart(profile(), [])
    assert bars_of(chart)["other"].is_hidden and chart.note.startswith("The process itself, Python with its libraries")


@pytest.mark.parametrize(("most", "unit"), [(2**30, "MiB"), (2**30 + 1, "GiB")])
def test_the_unit_suits_the_largest_stage(most: int, unit: str) -> None:
    ranks = [replace(rank, memory_bytes={"parameters": most}) for rank in profile().ranks]
    assert memory_chart(replace(profile(), device="cuda", ranks=ranks), []).axis == unit


def test_without_measured_memory_there_is_no_picture_of_it() -> None:
    ranks = [replace(rank, memory_bytes={}) for rank in profile().ranks]
    shown = replace(run(), profiles=[replace(profile(), ranks=ranks)])
    assert [chart.key for chart in step_charts(shown)] == ["timeline", "layers"]


STAGE = {"stage": 0, "first": 0, "last": 3, "kinds": {"Layer": 3, "Head": 1}, "parameters": 2_500_000}


def test_a_run_without_a_profile_shows_its_stages() -> None:
    (chart,) = step_charts(run(stages=[STAGE, {**STAGE, "stage": 1}, {"stage": 2}, None]))
    assert chart.rows == ["stage 0", "stage 1"] and chart.bars[0].lengths == [2.5, 2.5]
    assert chart.bars[0].hovers[0] == "3 x Layer, 1 x Head<br>2.50 million parameters"
    assert step_charts(run(stages=None)) == step_charts(run(stages=[])) == []


def line(count: int, **more: Any) -> Line:
    return Line(name="training", color="#000", x=list(range(count)), y=[1.0] * count, **more)


def lines(*found: Line, marks: tuple[ChartMark, ...] = ()) -> dict[str, Any]:
    return figure(LineChart(key="loss", title="loss", lines=found, marks=marks))


@pytest.mark.parametrize(
    ("shown", "mode"),
    [
        pytest.param(line(2), "lines", id="a line"),
        pytest.param(line(1), "markers", id="one point is no line"),
        pytest.param(line(5, is_points=True), "markers", id="single values"),
    ],
)
def test_a_single_value_is_a_dot(shown: Line, mode: str) -> None:
    assert lines(shown)["data"][0]["mode"] == mode


def test_each_of_few_steps_has_a_tick() -> None:
    assert lines(line(FEW_STEPS))["layout"]["xaxis"]["dtick"] == 1
    assert lines(line(FEW_STEPS + 1))["layout"]["xaxis"]["dtick"] is None


def test_marks_are_dots_and_the_first_of_them_lines() -> None:
    restarts = tuple(ChartMark(x=step, kind="restart", text=str(step)) for step in range(MOST_SHOWN_MARKS + 5))
    found = lines(line(3), marks=(ChartMark(x=1, kind="checkpoint", text="c"), *restarts))
    names = [trace["name"] for trace in found["data"]]
    assert names == ["training", "checkpoint", "restart"] and found["layout"]["showlegend"]
    assert len(found["data"][2]["x"]) == MOST_SHOWN_MARKS + 5  # all of them can be pointed at
    assert len(found["layout"]["shapes"]) == MOST_SHOWN_MARKS  # and a checkpoint is no line
    assert not lines(line(3))["layout"]["showlegend"]


def test_rows_lie_and_columns_stand() -> None:
    bars = Bars(name="a", color="#000", rows=["r"], starts=[1.0], lengths=[2.0], hovers=["h"], is_hidden=True)
    chart = BarChart(key="k", title="t", axis="ms", rows=["r", "s"], bars=[bars])
    lying = figure(chart)
    assert (lying["data"][0]["orientation"], lying["data"][0]["x"], lying["data"][0]["y"]) == ("h", [2.0], ["r"])
    assert lying["data"][0]["visible"] == "legendonly" and lying["layout"]["yaxis"]["autorange"] == "reversed"
    standing = figure(replace(chart, is_upright=True, dividers=[(0, "stage 0"), (1, "stage 1")]))
    assert (standing["data"][0]["orientation"], standing["data"][0]["y"]) == ("v", [2.0])
    assert [shape["x0"] for shape in standing["layout"]["shapes"]] == [0.5]  # before the first there is nothing to part
    assert [note["x"] for note in standing["layout"]["annotations"]] == [-0.5, 0.5]
