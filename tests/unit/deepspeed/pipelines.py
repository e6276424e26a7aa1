"""Pipeline engines of one stage with several chunks of a model, which exchange within the stage."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import deepspeed
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.nn import functional

from harness.config.values.model_chunks import ModelChunks
from harness.deepspeed.schedule import StageProgram, run_schedule
from harness.parallel.pipeline.schedules.instructions import buffers, instructions
from harness.parallel.pipeline.schedules.orders import ORDERS, Kind, Pass
from harness.parallel.pipeline.staged_module import StagedModule
from harness.parallel.weight_gradients import DeferredGradients, attach
from harness.topology.layout import Layout

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
LAYERS, WIDTH = 4, 3
LATE = "weight gradients last"


def pipeline(chunks: ModelChunks, micro_batches: int, *, bf16: bool = False) -> PipelineEngine:
    """Return an engine of four layers, the same in however many chunks they lie."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for number, layer in enumerate(layers):
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(number))
        nn.init.zeros_(layer.bias)
    module = StagedModule(
        layers,
        layout=Layout(),
        boundaries=[LAYERS * chunk // chunks.count for chunk in range(chunks.count + 1)],
        chunks=chunks,
        loss_fn=functional.mse_loss,
        checkpoint_interval=0,
        seed=0,
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": bf16},
    }
    engine: PipelineEngine = deepspeed.initialize(model=module, config=config)[0]
    return engine


def late(chunks: ModelChunks, micro_batches: int, _stage: int) -> Iterator[Pass]:
    """Yield passes of which all that compute weight gradients come last."""
    own = range(chunks.count)
    yield from (Pass(Kind.FORWARD, number, chunk) for number in range(micro_batches) for chunk in own)
    for kind in (Kind.INPUT_GRADIENTS, Kind.WEIGHT_GRADIENTS):
        yield from (Pass(kind, number, chunk) for number in range(micro_batches) for chunk in reversed(own))


def program(name: str, chunks: ModelChunks, micro_batches: int, *, forwards_only: bool = False) -> StageProgram:
    """Return what the stage does by one of the schedules, or by LATE."""
    order = late if name == LATE else ORDERS[name]
    passes = [each for each in order(chunks, micro_batches, 0) if not forwards_only or each.kind is Kind.FORWARD]
    steps = [(each.action.value, each.micro_batch, each.chunk) for each in instructions(passes, chunks.count)]
    return StageProgram(instructions=steps, buffers=buffers(passes))


def scheduled(
    name: str, chunks: ModelChunks, micro_batches: int, *, bf16: bool = False
) -> tuple[PipelineEngine, DeferredGradients]:
    """Return an engine that trains by a schedule, and what puts off its weight gradients."""
    engine, gradients = pipeline(chunks, micro_batches, bf16=bf16), DeferredGradients()
    attach(engine.module, gradients)

    def evaluation(count: int) -> StageProgram:
        return program(name, chunks, count, forwards_only=True)

    own = program(name, chunks, micro_batches)
    hooks = {name: getattr(gradients, name) for name in ("defer", "compute", "clear")}
    run_schedule(engine, chunks, own, evaluation, **hooks)
    return engine, gradients


def batches(seed: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield micro-batches without end, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(2, WIDTH, generator=generator).to(dtype), torch.randn(2, WIDTH, generator=generator).to(dtype)


def weights(engine: PipelineEngine) -> list[Tensor]:
    """Return copies of all weights."""
    return [parameter.detach().clone() for parameter in engine.module.parameters()]
