"""The picture of a run shows every step, evaluation and layer; a folder without a run is one line. Those of a plan and
of a refused config are what the planner and the check say today; that of an export has each byte at its rank."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness.checking import check
from harness.cli import main as ds_harness
from harness.config.text.document import load
from scripts import draw_check, draw_export, draw_plan
from scripts.svg import PALE

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


def shapes(folder: Path, kind: str, name: str = "run.svg") -> list[dict[str, str]]:
    """The attributes of every shape of a kind, and its text."""
    tree = ElementTree.parse(folder / name)
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


def test_the_recipe_of_a_refused_config_is_what_the_check_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/recipes/refused-config.md").read_text()
    config, command, output = re.findall(r"^```\w*\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "ds.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    assert ds_harness(command.split()[1:]) == 1
    assert capsys.readouterr().out == output
    drawn = draw_check.draw(load("ds.json"), check(load("ds.json"), world_size=8)).text()
    kept = (ROOT / "docs/images/recipes/refused.svg").read_text()
    assert drawn == kept, "run: python scripts/draw_check.py ds.json --world_size 8, with the config of the page"


def write_header(path: Path, sizes: dict[str, int], dtype: str, width: int) -> None:
    """Write a safetensors file of vectors, without their values."""
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [end, end + width * size]}
        end += width * size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_the_picture_of_an_export_has_each_layer_in_the_colour_of_its_rank(tmp_path: Path) -> None:
    names = [
        "lm_head.weight",
        "m.embed.weight",
        *(f"m.layers.{n}.{x}" for n in range(3) for x in "ab"),
        "m.norm.weight",
    ]
    sizes = dict(zip(names, [300, 200, *[250] * 6, 500], strict=True))  # as many as STAGES has
    checkpoint, model = tmp_path / "run/checkpoint-1", tmp_path / "model"
    for name in ("model", "exp_avg"):
        write_header(checkpoint / f"{name}.safetensors", sizes, "F32", 4)
    write_header(model / "model.safetensors", sizes, "BF16", 2)
    (tmp_path / "run/run.json").write_text(json.dumps({"stages": STAGES}))
    (tmp_path / "picture.svg").write_text(draw_export.draw(checkpoint, model).text())
    boxes = [box for box in shapes(tmp_path, "rect", "picture.svg") if box.get("height") == f"{draw_export.HIGH:.1f}"]
    assert [PALE.index(box["fill"]) for box in boxes] == [1, 0, 0, 0, 1, 1] * 3
    widths = [sum(float(box["width"]) for box in boxes[first : first + 6]) for first in (0, 6, 12)]
    assert widths == pytest.approx([draw_export.BAR, draw_export.BAR, draw_export.BAR / 2], abs=0.5)
    write_header(model / "model.safetensors", {**sizes, "m.norm.weight": 501}, "BF16", 2)
    with pytest.raises(ValueError, match="does not hold the parameters"):
        draw_export.draw(checkpoint, model)
