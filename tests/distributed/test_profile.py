"""Profiled runs have the numbers of others, in any layout, and what they measure holds together."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness import Trainer
from harness.profile.record import read_steps
from harness.profile.timeline import bubble
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Job, arguments_of, rows, tiny_model

pytestmark = pytest.mark.ranks

STEPS = 5
LAYOUTS = ["pp2z1", "dp2z3", "tp2z0"]


def train(job: Job, folder: str, profile: int) -> list[str]:
    """Train; return the lines of the metrics that do not depend on time."""
    arguments = arguments_of(job, folder, max_steps=STEPS, profile=profile)
    trainer = Trainer(job.model, arguments, rows())
    trainer.train()
    trainer.close()
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.dumps([json.loads(line)[name] for name in ("step", "loss", "grad_norm")]) for line in lines]


def all_layouts(model: str, folder: str) -> list[tuple[list[str], list[str]]]:
    """Train in each layout, plain and profiled; and a run that ends before as many steps as are to be profiled."""
    train(Job(model, "dp2z1"), f"{folder}/short", STEPS + 1)
    return [
        (train(Job(model, name), f"{folder}/{name}-plain", 0), train(Job(model, name), f"{folder}/{name}", 2))
        for name in LAYOUTS
    ]


def test_profiled_steps_have_the_same_numbers_and_hold_together(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", True)
    for plain, profiled in run_ranks(2, all_layouts, model, str(tmp_path))[0]:
        assert plain == profiled and len(plain) == STEPS
    short = json.loads((tmp_path / "short/profile/summary.json").read_text())
    assert short["steps"] == [step.step for step in read_steps(tmp_path / "short")] == [1, 2, 3, 4, 5]
    for name in LAYOUTS:
        assert not (tmp_path / f"{name}-plain/profile").exists()
        folder = tmp_path / name / "profile"
        run_id = json.loads((tmp_path / name / "run.json").read_text())["run_id"]
        steps = list(read_steps(tmp_path / name, run_id))
        assert [step.step for step in steps] == [3, 4]
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["steps"] == [3, 4]
        check_times(steps, summary)
        check_memory(summary, Job(model, name))
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 1}


def check_times(steps: list[Any], summary: dict[str, Any]) -> None:
    """Every layer has its times, and lies within its instructions; a stage computes less than a step takes."""
    passes = {f"{kind}_seconds_per_micro_batch" for kind in ("forward", "backward")}
    assert all(passes <= layer.keys() and all(layer[name] > 0 for name in passes) for layer in summary["layers"])
    for step in steps:
        found = bubble(step)
        assert (found is None) == (step.stages == 1)
        if found is not None:
            assert found.balanced == pytest.approx(1 / (step.micro_batches + 1)) and 0 < found.measured < 1
        for rank in step.ranks:
            spans = rank.instructions
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans))
            kinds = [span.kind for span in spans if span.kind in ("forward", "backward", "step")]
            assert kinds.count("forward") == step.micro_batches and kinds[-1] == "step"
            for layer in rank.layers:
                kind = "forward" if layer.kind == "forward" else "backward"
                assert any(s.kind == kind and s.start <= layer.start and layer.end <= s.end for s in spans), layer


def check_memory(summary: dict[str, Any], job: Job) -> None:
    """Parameters and Adam's moments are what the layout leaves of them; the parts add up to the peak."""
    for stage in summary["stages"]:
        memory = stage["memory_bytes"]
        assert sum(memory.values()) == 2 * memory["peak"] and min(memory.values()) >= 0
        # ZeRO has copies of its own of the parameters that it steps on; all have two moments. ZeRO-3 keeps parameters
        # as small as these whole besides its half, and so has three times its half
        expected = {"pp2z1": 3, "dp2z3": 1, "tp2z0": 2}[job.layout] * memory["parameters"]
        assert memory["optimizer"] == pytest.approx(expected, rel=0.05), (job.layout, memory)
