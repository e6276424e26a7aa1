"""Folders of runs as `ds-harness report` finds them, for the tests of the report."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.report.profile.record import FOLDER, write_step
from tests.unit.report.profile.made import profile

BATCH = 4


def write_run(folder: Path) -> Path:
    """A profiled run of five steps: a checkpoint at 4, a fault in step 2, 8 samples left out before step 5."""
    (folder / FOLDER).mkdir(parents=True)
    (folder / "checkpoint-4").mkdir()
    rows = [
        {"step": step, "loss": 5.0 / step, "grad_norm": None if step == 2 else 1.0, "learning_rate": 1e-4}
        | {"tokens_per_second": 100.0 * step, "consumed_samples": BATCH * step + 8 * (step == 5)}
        for step in range(1, 6)
    ]
    half = '{"step": 6, "loss": 0.'
    (folder / "metrics.jsonl").write_text("\n".join([*map(json.dumps, rows), half]))
    (folder / "evaluations.jsonl").write_text(json.dumps({"step": 4, "eval_loss": 2.5}) + "\n")
    (folder / "restarts.jsonl").write_text(json.dumps({"step": 2, "cause": "rank 1: </script><b>out of memory"}) + "\n")
    about = {
        "run_id": "run",
        "config": {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 2, "zero_optimisation": {"stage": 3}},
        "layout": {"pipeline": 2, "data": 1, "tensor": 1, "world_size": 2},
        "arguments": {"seed": 1, "output_dir": str(folder)},
        "stages": [{"stage": 0, "first": 0, "last": 1, "kinds": {"Layer": 2}, "parameters": 1200}],
    }
    (folder / "run.json").write_text(json.dumps(about))
    for step in (3, 4):
        write_step(folder / FOLDER, profile(step))
    write_step(folder / FOLDER, profile(5, "another run"))
    return folder


def write_other(run: Path) -> Path:
    """The same run with another seed, without profile and run.json's stages."""
    folder = run.with_name("second")
    shutil.copytree(run, folder)
    shutil.rmtree(folder / FOLDER)
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, "arguments": {"seed": 2}, "run_id": "second"}))
    return folder


def made(output: Path, *words: object) -> tuple[str, dict[str, Any]]:
    """The page that the command writes, and its figures."""
    pytest.importorskip("plotly")
    assert main(["report", *map(str, words), "--output", str(output)]) == 0
    html = output.read_text(encoding="utf-8")
    (figures,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', html, re.S)
    return html, json.loads(figures)
