"""Pipeline engines of one stage with several chunks of a model, which exchange within the stage."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.nn import functional

from harness.deepspeed.initialize import initialize
from harness.deepspeed.schedule import Schedule, StageProgram
from harness.deepspeed.update import StagedEngine, UpdateParts
from harness.parallel.pipeline.instructions import buffers, instructions
from harness.parallel.pipeline.staged_module import StagedModule
from harness.parallel.weight_gradients import DeferredGradients, attach
from harness.schedules import SCHEDULES, Kind, ModelChunks, Pass
from harness.topology.groups import build_groups
from harness.topology.layout import Layout

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
LAYERS, WIDTH = 4, 3
LATE = "weight gradients last"


class SquaredError:
    """A loss as engines of the harness call it."""

    reported: Mapping[str, Tensor] = MappingProxyType({})

    def expect(self, targets: Tensor | None) -> None:
        """Take the targets of the next forward pass."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error."""
        return functional.mse_loss(outputs, targets)


def staged(chunks: ModelChunks) -> StagedModule:
    """Return a stage of four layers, the same in however many chunks they lie."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for number, layer in enumerate(layers):
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(number))
        nn.init.zeros_(layer.bias)
    return StagedModule(
        layers,
        layout=Layout(),
        boundaries=[LAYERS * chunk // chunks.count for chunk in range(chunks.count + 1)],
        chunks=chunks,
        loss_fn=SquaredError(),
        checkpoint_interval=0,
        seed=0,
    )


def config_of(micro_batches: int, *, bf16: bool = False, zero_stage: int = 0) -> dict[str, Any]:
    """Return a config without clipping: DeepSpeed sums the norm in another precision."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1 if bf16 else zero_stage},  # the least that DeepSpeed sums in float32 with
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",  # by itself DeepSpeed rounds these sums to bf16
    }


def pipeline(micro_batches: int, *, bf16: bool = False) -> PipelineEngine:
    """Return DeepSpeed's own engine of one chunk."""
    config = config_of(micro_batches, bf16=bf16)
    engine: PipelineEngine = deepspeed.initialize(model=staged(ModelChunks(1)), config=config)[0]
    return engine


def late(chunks: ModelChunks, micro_batches: int, _stage: int) -> Iterator[Pass]:
    """Yield passes of which all that compute weight gradients come last."""
    own = range(chunks.count)
    yield from (Pass(Kind.FORWARD, number, chunk) for number in range(micro_batches) for chunk in own)
    for kind in (Kind.INPUT_GRADIENTS, Kind.WEIGHT_GRADIENTS):
        yield from (Pass(kind, number, chunk) for number in range(micro_batches) for chunk in reversed(own))


def program(name: str, chunks: ModelChunks, micro_batches: int, *, forwards_only: bool = False) -> StageProgram:
    """Return what the stage does by one of the schedules, or by LATE."""
    order = late if name == LATE else SCHEDULES[name].order
    passes = [each for each in order(chunks, micro_batches, 0) if not forwards_only or each.kind is Kind.FORWARD]
    steps = [(each.action.value, each.micro_batch, each.chunk) for each in instructions(passes, chunks.count)]
    return StageProgram(instructions=steps, buffers=buffers(passes))


def scheduled(
    name: str, chunks: ModelChunks, micro_batches: int, *, bf16: bool = False, zero_stage: int = 0
) -> StagedEngine:
    """Return an engine of the harness that trains by a schedule."""
    deferred, module = DeferredGradients(), staged(chunks)
    attach(module, deferred)
    schedule = Schedule(
        chunks=chunks,
        training=lambda count: program(name, chunks, count),
        evaluation=lambda count: program(name, chunks, count, forwards_only=True),
        deferred=deferred,
        defers=True,
    )
    return built(module, schedule, config_of(micro_batches, bf16=bf16, zero_stage=zero_stage))


def built(module: StagedModule, schedule: Schedule, config: dict[str, Any]) -> StagedEngine:
    """Return the harness's engine around a stage."""
    parts = UpdateParts(
        groups=build_groups(Layout()),
        sum_partial=lambda _gradient_of: None,
        is_partial=lambda _parameter: False,
        skips_nonfinite=True,
    )
    engine = initialize(
        partial(StagedEngine, parts, schedule),
        zero_stage=config["zero_optimization"]["stage"],
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        config=config,
        dist_init_required=False,
    )
    assert isinstance(engine, StagedEngine)
    return engine


def batches(seed: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield micro-batches without end, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(2, WIDTH, generator=generator).to(dtype), torch.randn(2, WIDTH, generator=generator).to(dtype)


def weights(engine: PipelineEngine) -> list[Tensor]:
    """Return copies of all weights."""
    return [parameter.detach().clone() for parameter in engine.module.parameters()]
