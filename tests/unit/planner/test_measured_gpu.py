"""Steps that GPUs measured (`scripts/bench/results/gpu*.json`, 26 and 27 November 2026), predicted from device files.

The harness of the first day had DeepSpeed sum and update in bf16. What this moved was counted in a trace of its step;
all else is predicted as it is today.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.planner.hardware import load_hardware
from harness.planner.layer_time import BACKWARD_RATE
from harness.planner.model_config import decoder_of
from harness.planner.step import step_seconds
from harness.planner.update_traffic import update_traffic
from harness.planner.workload import DEEPSPEED, HABITS, Strategy, UpdateTraffic, Workload

MEASURED = json.loads(Path("scripts/bench/results/gpu.json").read_text(encoding="utf-8"))
H100 = load_hardware("h100")
WORK = Workload(shape=decoder_of({"model_type": "llama", **MEASURED["work"]["shape"]}, "measured"), sequence=4096)
STEP = Strategy(zero_stage=1, micro_batch=1, accumulation=4, flat_sums=True, split_table=True)
# Bytes a parameter: every micro-batch widens, adds, and sets the bf16 gradient to zero (26, in three kernels a tensor).
# Once: to bf16 and back for a reduction over one rank, the norm, clipping, the update, the copy of the weights, and two
# times zeros. The norm takes 3,281 kernels, clipping 147.
THAT_DAY = UpdateTraffic(first=26, later=26, own=12 + 4 + 8 + 28 + 6 + 8, kernels_each=3, kernels=3281 + 147)


def seconds(workload: Workload, strategy: Strategy = STEP) -> float:
    return step_seconds(H100, workload, strategy).total


@pytest.mark.parametrize(
    ("program", "kernels", "within"),
    [
        ("harness", "single", 0.05),
        ("harness, Liger", "fused", 0.05),
        ("harness, compiled", "compiled", 0.05),
    ],
)
def test_a_step_of_that_day_takes_as_long_as_predicted(program: str, kernels: str, within: float) -> None:
    habits = replace(DEEPSPEED, update=THAT_DAY, loss_in_one_pass=False, cudnn_attention=False)
    measured = MEASURED["speed"][program]["step_seconds"]
    assert seconds(replace(WORK, habits=habits, kernels=kernels)) == pytest.approx(measured, rel=within)


def test_a_step_of_huggingface_s_trainer_takes_as_long_as_predicted() -> None:
    measured = MEASURED["speed"]["HF Trainer with DeepSpeed"]["step_seconds"]
    like = replace(WORK, habits=HABITS["huggingface"], gradient_bytes=2)
    assert seconds(like, replace(STEP, flat_sums=False)) == pytest.approx(measured, rel=0.05)


def test_a_step_of_today_is_faster_by_what_it_no_longer_moves() -> None:
    today = update_traffic(WORK, STEP)
    assert (today.first, today.later) == (6, 10)
    bytes_less = 4 * THAT_DAY.mean_sum(4) - 4 * today.mean_sum(4) + THAT_DAY.own - today.own
    less = WORK.shape.parameters * bytes_less / H100.memory_bytes_per_second
    before = seconds(replace(WORK, habits=replace(DEEPSPEED, update=THAT_DAY)))
    assert 0 < before - seconds(WORK) - less < 0.025  # and kernels
    assert 0.27 < seconds(replace(WORK, kernels="fused")) < 0.29


def test_a_step_of_an_h200_without_fused_kernels_takes_as_long_as_predicted() -> None:
    measured = json.loads(Path("scripts/bench/results/gpu-h200.json").read_text(encoding="utf-8"))
    of_that_day = replace(WORK, habits=replace(DEEPSPEED, loss_in_one_pass=False, cudnn_attention=False))
    predicted = step_seconds(load_hardware("h200"), of_that_day, STEP).total
    assert predicted == pytest.approx(measured["speed"]["harness"]["step_seconds"], rel=0.05)


def test_deepspeed_s_hooks_hide_behind_enough_work_on_a_gpu() -> None:
    whole = replace(STEP, zero_stage=3, flat_sums=False, gathers_once=True, dp_size=8)
    slow, fast = (replace(H100, dispatch_seconds=each) for each in (15e-6, 1e-9))

    def more(micro_batch: int, habits: str = "deepspeed") -> float:
        one, work = replace(whole, micro_batch=micro_batch), replace(WORK, habits=HABITS[habits])
        return step_seconds(slow, work, one).total / step_seconds(fast, work, one).total

    assert more(1) > 1.5
    assert more(16) == pytest.approx(1, abs=0.01)
    assert more(1, "torchtitan") == pytest.approx(1, abs=0.05)  # FSDP has no such hooks


def test_attention_and_fp8_products_of_a_device_are_those_that_it_measured() -> None:
    found = json.loads(Path("scripts/bench/results/gpu-h200-operations.json").read_text(encoding="utf-8"))["operations"]
    device = replace(load_hardware("h200"), kernel_seconds=0.0)
    for head in (64, 128):
        measured = found["attention"][f"head {head}, cuDNN"]
        flops = 2 * 32 * 4096**2 * 2 * head / 2  # causal
        seconds = flops / (device.flops["bf16"] * device.own_attention_efficiency(head))
        assert 1e6 * seconds == pytest.approx(measured["forward"], rel=0.02)
        assert 1e6 * 2.5 * seconds / BACKWARD_RATE == pytest.approx(measured["backward"], rel=0.07)
    up = found["products"]["up"]
    assert device.reached_flops("bf16") / device.reached_flops("fp8") == pytest.approx(
        up["fp8 product"] / up["forward"], rel=0.01
    )
    assert load_hardware("h100").own_attention_efficiency(96) == pytest.approx((0.38 + 0.549) / 2)
    assert load_hardware("l40s").own_attention_efficiency(64) == load_hardware("l40s").torch_attention_efficiency
