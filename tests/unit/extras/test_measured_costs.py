"""Layers are timed once for each kind, and a user's own are left as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from harness import TrainingArguments
from harness.device.process_group import start
from harness.extras.measured_costs import measured_costs
from harness.installed import read_run_config
from harness.topology.env import LaunchEnv
from harness.topology.groups import Groups, build_groups
from harness.topology.layout import Layout
from harness.training.engine.spec import EngineSpec
from harness.training.prepare.trainable import trainable_layers


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    start(LaunchEnv())
    yield build_groups(Layout.from_world(1, pp_size=1, tp_size=1))


def spec(stages: int) -> EngineSpec:
    config = {"train_batch_size": "auto", "pipeline": {"stages": stages}}
    args = TrainingArguments(deepspeed_config=config)
    resolved = read_run_config(args, world_size=stages).resolved
    return EngineSpec(args=args, resolved=resolved, max_steps=1)


def test_every_layer_is_timed_and_those_of_one_kind_once(groups: Any) -> None:
    calls: list[int] = []

    class Counting(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            calls.append(self.out_features)
            return super().forward(given)

    own = Counting(4, 4)
    model = trainable_layers(
        [LayerSpec(Counting, 4, 4), LayerSpec(Counting, 4, 4), own, torch.tanh, LayerSpec(Counting, 4, 2)],
        nn.functional.mse_loss,
        (torch.zeros(3, 4), torch.zeros(3, 2)),
    )
    before = {name: value.clone() for name, value in own.state_dict().items()}
    calls.clear()
    found = measured_costs(model, spec(2), groups.device, torch.ones(3, 4), torch.zeros(3, 2))
    assert len(found) == 5 and min(found) > 0
    assert found[0] == found[1] == found[2]  # one kind, timed once
    assert calls.count(4) == 3 + 3 and calls.count(2) == 3 + 1  # three rounds, and one pass that hands on the values
    assert own.weight.grad is None and own.weight.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
