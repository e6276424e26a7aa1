"""The report: what it shows of a run, of several, of half a run; that it is whole by itself."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.report.profile.record import FOLDER
from harness.report.profile.summary import summary
from harness.report.run_charts import MOST_POINTS, Point, thinned
from tests.support.report_runs import made, write_other, write_run
from tests.unit.report.profile.made import MEMORY, profile


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first")


@pytest.fixture
def other(run: Path) -> Path:
    return write_other(run)


def points(figure: dict[str, Any], name: str) -> list[tuple[float, Any]]:
    (trace,) = [trace for trace in figure["data"] if trace["name"] == name]
    return list(zip(trace["x"], trace["y"], strict=True))


def test_a_page_shows_what_the_files_of_a_run_say(run: Path, tmp_path: Path) -> None:
    html, figures = made(tmp_path / "report.html", run)
    assert points(figures["loss"], "training") == [(step, 5.0 / step) for step in range(1, 6)]
    assert points(figures["loss"], "evaluation") == [(4, 2.5)]
    assert points(figures["grad_norm"], "training")[1] == (2, None)
    marks = {kind: points(figures["loss"], kind)[0][0] for kind in ("checkpoint", "restart", "rollback")}
    assert marks == {"checkpoint": 4, "restart": 2, "rollback": 5}
    # median of two steps that are alike: the later one; the profile of another run is left out
    assert "Step 4 on each rank" in html
    waits = next(trace for trace in figures["timeline-0"]["data"] if trace["name"].startswith("waits"))
    assert waits["base"][:2] == [2600.0, 6800.0] and waits["x"][:2] == pytest.approx([3000.0, 3000.0])
    (optimizer,) = [trace for trace in figures["memory-0"]["data"] if trace["name"] == "optimizer"]
    assert optimizer["x"] == [MEMORY["optimizer"] / 2**20] * 2
    assert [note["text"] for note in figures["layers-0"]["layout"]["annotations"]] == ["stage 0", "stage 1"]
    shares = summary([profile()])["bubble"]
    assert all(f"<b>{share:.1%}</b>" in html for share in shares.values())
    assert "DS101" in html and "zero_optimization" in html  # the check's word on the misspelt key


def test_each_named_set_of_evaluation_data_has_its_own_points(run: Path, tmp_path: Path) -> None:
    rows = [
        {"step": 2, "eval_code_loss": 3.5},
        {"step": 2, "eval_law_text_loss": 4.5},
        {"step": 4, "eval_code_loss": 3},
    ]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, figures = made(tmp_path / "report.html", run)
    assert points(figures["loss"], "evaluation on code") == [(2, 3.5), (4, 3)]
    assert points(figures["loss"], "evaluation on law_text") == [(2, 4.5)]
    colours = {
        trace["name"]: trace["marker"]["color"] for trace in figures["loss"]["data"] if "evaluation" in trace["name"]
    }
    assert "evaluation" not in colours and len(set(colours.values())) == 2


def test_each_source_of_the_data_has_its_own_line(run: Path, tmp_path: Path) -> None:
    losses = [{"chat": 2.0, "text": 3.0}, {"text": 2.5}, {"chat": 1.0, "text": None}, "damaged", {}]
    rows = [{"step": step, "loss": 3, "source_losses": each} for step, each in enumerate(losses, start=1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, figures = made(tmp_path / "report.html", run)
    assert points(figures["loss"], "chat") == [(1, 2), (3, 1)]
    assert points(figures["loss"], "text") == [(1, 3), (2, 2.5)]


def test_a_page_is_whole_by_itself_and_words_from_files_do_nothing_in_it(run: Path, tmp_path: Path) -> None:
    html, figures = made(tmp_path / "report.html", run)
    outside = html.replace(re.findall(r"<script>.*?</script>", html, re.S)[0], "")  # plotly's program
    assert not re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", outside)
    assert html.count("</script>") == 3 and "&lt;/script&gt;&lt;b&gt;out of memory" in html
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in figures.values():
        graph_objects.Figure(figure)  # raises for a property that plotly does not have


def test_several_runs_are_compared_on_one_page(run: Path, other: Path, tmp_path: Path) -> None:
    html, figures = made(tmp_path / "report.html", run, other)
    assert points(figures["loss"], "first") == points(figures["loss"], "second")
    assert re.search(r"/arguments/seed</th><td>1</td><td>2</td>", html)
    assert "/config/" not in re.findall(r"<table>.*?</table>", html, re.S)[0]
    assert "timeline-0" in figures and "timeline-1" not in figures
    assert figures["stages-1"]["data"][0]["x"] == [0.0012] and "was not profiled" in html


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "no such folder: give the --output_dir of a run"),
        (["empty"], "holds no run: it has no run.json and no metrics.jsonl that can be read"),
        (["first", "first"], "is given twice"),
        (["first", "--output", "taken/report.html"], "taken: cannot be written"),
        (["first", "--hardware", "abacus"], "abacus"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    words: list[str], said: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    monkeypatch.chdir(run.parent)
    Path("empty").mkdir()
    Path("taken").write_text("a file")
    assert main(["report", *words]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and len(captured.err.splitlines()) == 1 and not captured.out


def test_a_missing_library_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["report", str(run)]) == 1
    assert capsys.readouterr().err == ("ds-harness report: plotly is not installed: pip install 'ds-harness[report]'\n")


def test_half_a_run_shows_what_there_is(run: Path, tmp_path: Path) -> None:
    (run / "run.json").write_text('{"config": {"train_ba')
    _, figures = made(tmp_path / "a.html", run)
    assert "loss" in figures and "timeline-0" in figures
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / FOLDER)
    (run / "run.json").write_text(json.dumps({"layout": {}, "config": None, "stages": [1], "arguments": None}))
    html, figures = made(tmp_path / "b.html", run)
    assert "loss" in figures and len(figures) == 1  # its evaluations
    assert "Step" not in html.partition("<script>")[0]


def test_a_long_curve_keeps_its_extremes_its_gaps_and_its_order() -> None:
    points: list[Point] = [(step, 1.0 + step % 7) for step in range(100_000)]
    points[54_321], points[77_777], points[500] = (54_321, 99.0), (77_777, -99.0), (500, None)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 1 and list(kept) == sorted(kept, key=lambda point: point[0])
    assert {points[54_321], points[77_777], points[500]} <= set(kept) and set(kept) <= set(points)
    assert thinned(points[:100]) == points[:100]
