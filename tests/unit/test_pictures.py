"""The picture of a run shows every step, evaluation and layer; a folder without a run is one line. That of a plan is
what the planner says today."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts import draw_plan

ROOT = Path(__file__).resolve().parents[2]
STAGES = [
    {"stage": 0, "ranks": [0, 1], "first": 0, "last": 2, "kinds": {"Prologue": 1, "Layer": 2}, "parameters": 1200},
    {"stage": 1, "ranks": [2, 3], "first": 3, "last": 4, "kinds": {"Layer": 1, "Epilogue": 1}, "parameters": 1300},
]


def draw(folder: Path, losses: list[float], evaluations: list[float]) -> subprocess.CompletedProcess[str]:
    """Write a run with these losses, an evaluation after each of the first steps, and draw it."""
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "tokens_per_second": 100.0, "step_seconds": 0.5}
        for step, loss in enumerate(losses, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluated = [{"step": step, "eval_loss": loss} for step, loss in enumerate(evaluations, start=1)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluated))
    (folder / "run.json").write_text(json.dumps({"stages": STAGES}))
    return run(folder)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/draw_run.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def shapes(folder: Path, kind: str) -> list[dict[str, str]]:
    """The attributes of every shape of a kind, and its text."""
    tree = ElementTree.parse(folder / "run.svg")
    return [{**e.attrib, "text": e.text or ""} for e in tree.iter() if e.tag.endswith(f"}}{kind}")]


@pytest.mark.parametrize("losses", [[5.0, 3.0, 2.5], [2.0], [-0.5, -1.5], [7e5, 1.0]])
def test_every_step_and_evaluation_is_inside_the_picture(tmp_path: Path, losses: list[float]) -> None:
    done = draw(tmp_path, losses, losses)
    assert done.returncode == 0, done.stderr
    curve = next(line["points"].split() for line in shapes(tmp_path, "polyline") if line["stroke-width"] == "2")
    assert len(curve) == len(losses) == len(shapes(tmp_path, "circle"))
    heights = [float(point.split(",")[1]) for point in curve]
    assert all(56 <= y <= 256 for y in heights)
    assert sorted(heights) == [y for _, y in sorted(zip(losses, heights, strict=True), reverse=True)]  # y points down
    layers = [box for box in shapes(tmp_path, "rect") if box["height"] == "34.0"]
    assert len(layers) == 5 and len({box["fill"] for box in layers}) == 2
    assert "stage 1 on ranks 2, 3: layers 3 to 4, 1,300 parameters a rank" in [
        t["text"] for t in shapes(tmp_path, "text")
    ]


def test_a_loss_that_is_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    assert draw(tmp_path, [5.0, float("nan"), 3.0], [float("inf")]).returncode == 0
    curve = next(line["points"].split() for line in shapes(tmp_path, "polyline") if line["stroke-width"] == "2")
    assert len(curve) == 2 and shapes(tmp_path, "circle") == []


def test_faults_stand_at_their_steps_with_their_causes(tmp_path: Path) -> None:
    causes = ["rank 1 was killed (SIGKILL)", "no answer from the agent on host-b", "rank 0 failed"]
    faults = [{"step": step, "cause": cause} for step, cause in zip((0, 2, 5), causes, strict=True)]
    (tmp_path / "restarts.jsonl").write_text("".join(json.dumps(fault) + "\n" for fault in faults))
    assert draw(tmp_path, [5.0, 4.0, 3.0, 2.5, 2.0], []).returncode == 0
    lines = [line["points"].split() for line in shapes(tmp_path, "polyline") if line["stroke"] == "#c44e52"]
    across = [float(points[0].split(",")[0]) for points in lines]
    assert across == sorted(across) and across[0] == 56 and across[-1] == 700
    words = {text["text"] for text in shapes(tmp_path, "text")}
    assert {f"{number}: {cause}" for number, cause in enumerate(causes, start=1)} <= words


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    for text in (None, "", "not json"):
        if text is not None:
            (tmp_path / "metrics.jsonl").write_text(text)
            (tmp_path / "run.json").write_text(json.dumps({"stages": STAGES}))
        done = run(tmp_path)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
        assert not (tmp_path / "run.svg").exists()


def test_the_picture_of_a_plan_is_what_the_planner_says() -> None:
    drawn = draw_plan.picture(draw_plan.distinct(draw_plan.planned()))
    assert drawn == draw_plan.PICTURE.read_text(), "run: python scripts/draw_plan.py"
