"""Profiled runs have the numbers of others, in any layout, and what they measure holds together."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness import Trainer
from harness.report.profile.profiler import ProfileCallback
from harness.report.profile.record import COMPUTING, RankProfile, StepProfile, read_steps
from harness.report.profile.timeline import bubble, with_answers, with_waits
from tests.support.ranks import run_ranks
from tests.support.training import Job, arguments_of, logged, rows, tiny_model

pytestmark = pytest.mark.ranks

STEPS = 5
FIRST, OTHERS = ("dp2z3",), ("pp2z1", "tp2z0")
SEVERAL_CHUNKS = {"dualpipe-v": [[0, 3], [1, 2]], "interleaved": [[0, 2], [1, 3]]}
"""The chunks of each stage; in the first some backward passes are whole and some are not."""


def train(job: Job, folder: str, profile: int) -> list[str]:
    """Train; return the lines of the metrics that do not depend on time."""
    arguments = arguments_of(job, folder, max_steps=STEPS, profile=profile)
    trainer = Trainer(job.model, arguments, rows())
    trainer.train()
    kept = [len(each._profiles) for each in trainer.callbacks if isinstance(each, ProfileCallback)]
    assert kept == [profile if trainer.run.groups.rank == 0 else 0] * bool(profile) or profile > STEPS
    trainer.close()
    return [json.dumps([row[name] for name in ("step", "loss", "grad_norm")]) for row in logged(folder)]


def by_schedule(model: str, name: str) -> Job:
    pipeline = {"stages": 2, "schedule": name, "activation_checkpoint_interval": 1}
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    return Job(model, "pp2z1", {"pipeline": pipeline, **sizes})


def several_chunks(model: str, schedule: str, folder: str) -> tuple[list[str], list[str]]:
    """Train by a schedule with several model chunks a stage, plain and profiled."""
    job = by_schedule(model, schedule)
    return train(job, f"{folder}/plain", 0), train(job, f"{folder}/profiled", 2)


def all_layouts(layouts: tuple[str, ...], model: str, folder: str) -> list[tuple[list[str], list[str]]]:
    """Train in each layout, plain and profiled; and a run that ends before as many steps as are to be profiled."""
    train(Job(model, "dp2z1"), f"{folder}/short", STEPS + 1)
    return [
        (train(Job(model, name), f"{folder}/{name}-plain", 0), train(Job(model, name), f"{folder}/{name}", 2))
        for name in layouts
    ]


@pytest.mark.parametrize("layouts", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_profiled_steps_have_the_same_numbers_and_hold_together(layouts: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", True)
    for plain, profiled in run_ranks(2, all_layouts, layouts, model, str(tmp_path))[0]:
        assert plain == profiled and len(plain) == STEPS
    short = json.loads((tmp_path / "short/profile/summary.json").read_text())
    assert short["steps"] == [step.step for step in read_steps(tmp_path / "short")] == [1, 2, 3, 4, 5]
    for name in layouts:
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


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["dualpipe-v", "interleaved"])
def test_profiled_steps_of_stages_with_several_chunks_tell_them_apart(schedule: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", True, num_hidden_layers=4)
    plain, profiled = run_ranks(2, several_chunks, model, schedule, str(tmp_path))[0]
    assert plain == profiled and len(plain) == STEPS
    of_stages, folder = SEVERAL_CHUNKS[schedule], tmp_path / "profiled"
    steps = list(read_steps(folder))
    assert [step.step for step in steps] == [3, 4]
    summary = json.loads((folder / "profile/summary.json").read_text())
    check_times(steps, summary)
    check_messages(steps[-1])
    chunks = [chunk for stage in summary["stages"] for chunk in stage["chunks"]]
    assert [chunk["chunk"] for chunk in chunks] == [chunk for own in of_stages for chunk in own]
    for chunk in chunks:
        first, last = chunk["layers"]
        stages = {layer["stage"] for layer in summary["layers"][first : last + 1]}
        assert [chunk["chunk"] in own for own in of_stages].index(True) == stages.pop() and not stages
        assert chunk["forward_seconds_per_micro_batch"] > 0 and chunk["backward_seconds_per_micro_batch"] > 0
    for rank in steps[-1].ranks:
        check_passes(rank, of_stages[rank.stage])
    events = json.loads((folder / "profile/trace.json").read_text())["traceEvents"]
    assert {f"ForwardPass, chunk {chunk}" for chunk in range(4)} <= {event["name"] for event in events}


def check_passes(rank: RankProfile, parts: list[int]) -> None:
    """Every micro-batch goes forward once through each part, and has all its gradients once."""
    done = [(span.name, span.chunk, span.micro_batch) for span in rank.instructions if span.kind in COMPUTING]
    every = {(part, micro_batch) for part in parts for micro_batch in range(8)}
    assert sorted(done) == sorted(set(done)) and {(p, m) for name, p, m in done if name == "ForwardPass"} == every
    whole, inputs, weights = (
        {(part, micro_batch) for name, part, micro_batch in done if name == kind}
        for kind in ("BackwardPass", "InputGradients", "WeightGradients")
    )
    assert whole | inputs == every and not whole & inputs and inputs == weights


def check_messages(step: StepProfile) -> None:
    """What is sent is received by the next part, or by the one before, of the same micro-batch."""
    pairs = [(span, other) for _, spans in with_answers(step) for span, other in spans if span.kind == "send"]
    sent = [(span, other) for span, other in pairs if span.name != "AwaitSends"]
    assert len(sent) == 2 * 3 * step.micro_batches
    for span, other in sent:
        assert other is not None and span.chunk is not None
        forward = span.name == "SendActivation"
        assert (other[1].chunk, other[1].micro_batch) == (span.chunk + (1 if forward else -1), span.micro_batch)
        assert step.chunks.stage_of(other[1].chunk) == other[0].stage and other[1].end >= span.start
    waits = [span for _, spans in with_waits(step) for span in spans if span.kind == "wait"]
    assert waits and {span.name for span in waits} <= {"RecvActivation", "RecvGrad"}


def check_times(steps: list[Any], summary: dict[str, Any]) -> None:
    """Every layer has its times, and lies within its instructions; a stage computes less than a step takes."""
    passes = {f"{kind}_seconds_per_micro_batch" for kind in ("forward", "backward")}
    assert all(passes <= layer.keys() and all(layer[name] > 0 for name in passes) for layer in summary["layers"])
    for step in steps:
        found = bubble(step)
        assert (found is None) == (step.pp_size == 1)
        if found is not None:
            balanced = 1 / (step.micro_batches + 1)
            if step.chunks_per_stage > 1:  # a half of it, and a sixth
                balanced = 1 / ((2 if step.schedule == "interleaved" else 6) * step.micro_batches + 1)
            assert found.balanced == pytest.approx(balanced) and 0 < found.measured < 1
        for rank in step.ranks:
            spans = rank.instructions
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans))
            kinds = [span.kind for span in spans if span.kind in ("forward", "backward", "step")]
            assert kinds.count("forward") == step.micro_batches * step.chunks_per_stage and kinds[-1] == "step"
            for layer in rank.layers:
                kind = "forward" if layer.kind == "forward" else "backward"
                assert any(s.kind == kind and s.start <= layer.start and layer.end <= s.end for s in spans), layer


def check_memory(summary: dict[str, Any], job: Job) -> None:
    """Parameters and Adam's moments are what the layout leaves of them; the parts add up to the peak."""
    for stage in summary["stages"]:
        memory = stage["memory_bytes"]
        assert sum(memory.values()) == 2 * memory["peak"] and min(memory.values()) >= 0
        # All have two moments. ZeRO-3 has a copy of its own of the parameters that it steps on, keeps parameters as
        # small as these whole besides its half, and so has three times its half
        expected = {"pp2z1": 2, "dp2z3": 1, "tp2z0": 2}[job.layout] * memory["parameters"]
        assert memory["optimizer"] == pytest.approx(expected, rel=0.05), (job.layout, memory)
