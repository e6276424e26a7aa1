"""Engines of one rank with a few weights: what a checkpoint is made of, and loaded into."""

from __future__ import annotations

import logging

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from harness.checkpoint.training_state import EngineState
from harness.deepspeed.zero3_parameters import restore_linear
from harness.topology.groups import Groups

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


class Tiny(nn.Module):
    """Two layers, a frozen one, a factor, and two buffers of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.frozen(self.second(torch.tanh(self.first(x))) * self.scale)
        return found


def engine_state(groups: Groups, zero_stage: int = 0, *, bf16: bool = False, seed: int = 0) -> EngineState:
    """Return an engine that has made no step yet."""
    torch.manual_seed(seed)
    module = Tiny()
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=0.05)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
    }
    engine: DeepSpeedEngine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    restore_linear()
    return EngineState(engine=engine, groups=groups, rename=str, adapters=False, one_host=True)


def step(state: EngineState, count: int = 1) -> None:
    """Make steps whose batches depend on the number of steps that were made."""
    engine = state.engine
    for _ in range(count):
        torch.manual_seed(1000 + engine.global_steps)
        batch = torch.randn(1, 3).to(next(engine.module.parameters()).dtype)
        engine.backward(engine(batch).float().square().sum())
        engine.step()


def values(state: EngineState) -> dict[str, Tensor]:
    """Return copies of the values that a checkpoint stores of the model, by name."""
    return {held.name: held.values.detach().clone().view(held.full_shape) for held in state.held()}
