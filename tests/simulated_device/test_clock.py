"""The communication that each layout does not hide behind computation, by the simulated device's clock.

Each number is the time of a step minus that of the same step with infinitely fast links, and has no noise.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.values.step_time import left_waits
from harness.schedules import model_chunks
from tests.support.ranks import run_ranks
from tests.support.simulated_device.timing import Timed, timed_all
from tests.support.training import Job, tiny_model

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]

BUCKET = 40_000  # elements: about a decoder layer
MICRO_BATCHES = 4


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, **more}}


SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "interleaved", "zero-bubble-v")
CONFIGS: dict[str, dict[str, Any]] = {
    "zero-1": zero(1),
    "zero-1 bf16": {"bf16": {"enabled": True}, **zero(1)},
    "zero-3": zero(3, stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=BUCKET, overlap_comm=True),
    **{schedule: {"pipeline": {"stages": 2, "schedule": schedule}} for schedule in SCHEDULES},
}
LENGTHS = {"zero-1": 4}
"""Of the samples: the first forward pass takes longer than all new weights in float32, which it hides."""
LAYERS = {"zero-1": 8}
"""Of the model: the update of the other layers takes longer than the weights of the first one, which it hides."""
Steps = dict[str, list[Timed]]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """By config, the steps of both ranks."""

    folder = tmp_path_factory.mktemp("clock")
    layers = {name: LAYERS.get(name, 6) for name in CONFIGS}
    models = {n: tiny_model(folder / f"llama-{n}", "llama", False, num_hidden_layers=n) for n in {*layers.values()}}
    layouts = {
        name: "pp2z0" if name in SCHEDULES else f"dp2z{config['zero_optimization']['stage']}"
        for name, config in CONFIGS.items()
    }
    jobs = [
        (Job(models[layers[name]], layouts[name], config), LENGTHS.get(name, 1)) for name, config in CONFIGS.items()
    ]
    ranks = run_ranks(2, timed_all, jobs, str(folder), timeout_s=400)
    return {name: list(pair) for name, *pair in zip(CONFIGS, *ranks, strict=True)}


@pytest.mark.parametrize("name", CONFIGS)
def test_all_ranks_have_one_clock(name: str, steps: Steps) -> None:
    first, second = steps[name]
    assert first.linked.length == pytest.approx(second.linked.length, rel=1e-5)
    assert first.linked.length > first.unlinked.length


@pytest.mark.parametrize("name", ["zero-1", "zero-1 bf16"])
def test_zero_1_shows_of_all_that_it_sends_the_last_reduction_at_most(name: str, steps: Steps) -> None:
    timed = steps[name][0]
    reductions, gathers = timed.linked.messages("reduce_scatter"), timed.linked.messages("all_gather")
    until_norm = timed.linked.until_norm - timed.unlinked.until_norm
    # of the reductions the last one, while the means of the others are already copied
    assert 0.5 * reductions[-1] < until_norm <= 1.2 * reductions[-1]
    assert timed.exposed <= 1.2 * reductions[-1]
    assert timed.exposed - until_norm < 0.1 * reductions[-1]  # new weights show nothing
    assert sum(reductions) > 5 * reductions[-1]
    assert sum(gathers) > 2.5 * reductions[-1]


def test_zero_3_shows_less_than_the_gathers_of_one_forward_pass(steps: Steps) -> None:
    timed = steps["zero-3"][0]
    gathers, reductions = timed.linked.messages("all_gather"), timed.linked.messages("reduce_scatter")
    # the first gather cannot be prefetched, and the others take longer here than the layers before them
    assert gathers[0] < timed.exposed < 0.75 * sum(gathers)
    assert sum(reductions) > 1.9 * sum(gathers)  # those of two micro-batches are hidden


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_wait_for_each_other_as_long_as_the_formula_says(name: str, steps: Steps) -> None:
    ranks = [timed.unlinked for timed in steps[name]]
    kernels = [rank.kernels_of_passes for rank in ranks]
    busy = [sum(kernel.end - kernel.start for kernel in each) for each in kernels]
    length = max(each[-1].end for each in kernels) - min(each[0].start for each in kernels)
    slowest, chunks = max(busy), model_chunks(2, name).per_stage
    expected = slowest + (sum(busy) - slowest) / MICRO_BATCHES * left_waits(2, MICRO_BATCHES, name, chunks)
    # the formula's thirds for weight gradients are too many where elementwise kernels, which have none, take most time
    assert length <= expected * (1.07 if name == "zero-bubble" else 1.01)
    assert length > slowest


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_between_stages_show_no_more_than_the_planner_says(name: str, steps: Steps) -> None:
    for timed in steps[name]:
        once = max(timed.linked.messages("send"))
        assert once < timed.exposed <= 2 * once * (MICRO_BATCHES * model_chunks(2, name).per_stage + 2 - 1)
