"""Which configs can keep parameters in float32 beside those in bf16."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.checking import resolve
from harness.config import AutoValues
from harness.config.text.document import from_text
from harness.training.engine.spec import can_keep_fp32, obstacle

CPU = {"device": "cpu"}


def resolved(zero: dict[str, Any], types: dict[str, Any]) -> Any:
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": zero, "data_types": types}
    return resolve(from_text(json.dumps(config)), AutoValues(world_size=1))


@pytest.mark.parametrize(
    ("zero", "types", "reason"),
    [
        ({"stage": 0}, {}, None),
        ({"stage": 2}, {}, None),
        ({"stage": 3}, {}, None),
        ({"stage": 3, "offload_optimizer": CPU}, {}, None),
        ({"stage": 2, "offload_optimizer": CPU}, {}, "offload_optimizer below ZeRO-3"),
        ({"stage": 3, "offload_param": CPU}, {}, "offload_param"),
        ({"stage": 2}, {"grad_accum_dtype": "bf16"}, "gradients that are accumulated in bf16"),
    ],
)
def test_where_parameters_can_stay_in_float32(zero: dict[str, Any], types: dict[str, Any], reason: str | None) -> None:
    run = resolved(zero, types)
    assert obstacle(run) == reason
    assert can_keep_fp32(run) is (reason is None)


def test_an_empty_list_keeps_nothing_in_any_layout() -> None:
    assert not can_keep_fp32(resolved({"stage": 2}, {"keep_in_fp32_modules": []}))
