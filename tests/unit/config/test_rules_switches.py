"""DS110 and DS503: a key that does nothing where it stands is told, and its nearest neighbour that acts is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.said import said

CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/x"}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


IDLE: list[tuple[dict[str, Any], str]] = [
    (
        zero(3, offload_param={**CPU, "max_in_cpu": 5}),
        "offload_param.max_in_cpu has no effect: offload_param.device is",
    ),
    (
        zero(2, offload_optimizer={**CPU, "pipeline_read": True}),
        "pipeline_read has no effect: offload_optimizer.device",
    ),
    (zero(2, offload_optimizer={**CPU, "nvme_path": "/x"}), "nvme_path has no effect"),
    (zero(3, offload_optimizer={**CPU, "cpuadam_cores_perc": 0.5}), "cpuadam_cores_perc has no effect: super_offload"),
    ({"aio": {"queue_depth": 4}}, "aio.queue_depth has no effect: nothing is offloaded to NVMe"),
    ({"activation_checkpointing": {"number_checkpoints": 4}}, "contiguous_memory_optimization is off"),
    ({"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}}, "prof_ops has no effect: prof_all is on"),
    ({"comms_logger": {"verbose": True}}, "comms_logger.verbose has no effect: comms_logger is off"),
    ({"flops_profiler": {"profile_step": 5}}, "flops_profiler is off"),
    ({"torch_autocast": {"dtype": "bfloat16"}}, "torch_autocast is off"),
    ({"compile": {"backend": "eager"}}, "compile is off"),
    ({"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 4}, **zero(1)}, "loss_scale fixes the scale"),
    ({"pipeline": {"stages": 1, "schedule": "zero-bubble"}}, "pipeline.schedule has no effect: there is one stage"),
    ({"pipeline": {"chunks_per_stage": 2}}, "pipeline.chunks_per_stage has no effect: there is one stage"),
]
ACT: list[dict[str, Any]] = [
    {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks_per_stage": 4}, "gradient_accumulation_steps": 8},
    zero(3, offload_optimizer={**NVME, "pipeline_read": True, "buffer_count": 8}) | {"aio": {"queue_depth": 4}},
    zero(2, offload_optimizer={**CPU, "buffer_count": 4, "pin_memory": True, "fast_init": False}),  # the defaults
    {"activation_checkpointing": {"number_checkpoints": 4, "contiguous_memory_optimization": True}},
    {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}},
    {"comms_logger": {"enabled": False, "verbose": True}, "flops_profiler": {"enabled": False, "profile_step": 5}},
    {"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 4}, **zero(1)},
]
OF_ANOTHER_STAGE: list[tuple[dict[str, Any], str]] = [
    (zero(3, allgather_bucket_size=1000), "allgather_bucket_size has an effect at ZeRO stage 1 and 2 only"),
    (zero(3, ignore_unused_parameters=False), "ignore_unused_parameters has an effect at ZeRO stage 1 and 2 only"),
    (zero(3, use_multi_rank_bucket_allreduce=False), "has an effect at ZeRO stage 1 and 2 only"),
    (zero(0, overlap_comm=True), "overlap_comm has an effect at ZeRO stage 1, 2 and 3 only, but the stage is 0"),
]


@pytest.mark.parametrize(("config", "words"), IDLE, ids=str)
def test_a_setting_whose_switch_is_off_is_told(config: dict[str, Any], words: str) -> None:
    (finding,) = said({"train_batch_size": 8, **config}, "DS110")
    assert words in finding


@pytest.mark.parametrize("config", ACT, ids=str)
def test_one_whose_switch_is_on_and_a_default_are_not(config: dict[str, Any]) -> None:
    assert said({"train_batch_size": 8, **config}, "DS110") == []


@pytest.mark.parametrize(("config", "words"), OF_ANOTHER_STAGE, ids=str)
def test_a_key_of_another_stage_is_told_whatever_its_default(config: dict[str, Any], words: str) -> None:
    (finding,) = said({"train_batch_size": 8, **config}, "DS503")
    assert words in finding
