"""Access DeepSpeed's engines: optimizers, evaluation, loss scaling, counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.optim import Optimizer

from harness.deepspeed.flat_tensors import EngineOptimizer

LOSS_SCALING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The attributes of DeepSpeed's loss scaler that change while it runs."""
GRADIENTS = ("grad", "_hp_grad", "grad_accum")
"""The attributes of a parameter that may hold its gradient."""


def inner_optimizers(engine: DeepSpeedEngine) -> list[Optimizer]:
    """Return the torch optimizers inside DeepSpeed's optimizer: two if a part of the states is offloaded."""
    found = [engine.basic_optimizer, getattr(engine.optimizer, "backup_optimizer", None)]
    return [optimizer for optimizer in found if isinstance(optimizer, Optimizer)]


def count_skipped_step(engine: DeepSpeedEngine) -> None:
    """Count the last step as skipped, which the engine cannot know without reading the norm."""
    engine.skipped_steps += 1
    engine._step_applied = False


def gradients_of(parameter: Tensor) -> Iterator[Tensor]:
    """Yield a parameter's gradients: torch's, the flat sum over micro-batches, and DeepSpeed's of any dtype."""
    for name in GRADIENTS:
        gradient: Tensor | None = getattr(parameter, name, None)
        if gradient is not None:
            yield gradient


def evaluate_pipeline(engine: PipelineEngine, batches: Sequence[object], steps: int) -> Tensor:
    """Return the mean loss of `steps` micro-batches, a scalar that is equal on all ranks."""
    # Otherwise DeepSpeed would log each call to its monitors as an evaluation.
    monitored = engine.monitor.enabled
    engine.monitor.enabled = False
    # Stages exchange shapes only with the first tensor that they send, and the next training step may have other ones.
    engine.reset_activation_shape()
    loss: Tensor = engine.eval_batch(iter(batches), num_micro_batches=steps, bcast_loss=True)
    engine.reset_activation_shape()
    engine.monitor.enabled = monitored
    # `eval_batch` leaves it in evaluation mode.
    engine.module.train()
    return loss


def scales_loss_dynamically(optimizer: EngineOptimizer) -> bool:
    """Return whether an engine's optimizer uses dynamic loss scaling (fp16)."""
    return bool(getattr(getattr(optimizer, "loss_scaler", None), "dynamic", False))


def loss_scaling(optimizer: EngineOptimizer) -> dict[str, float]:
    """Return the state of the dynamic loss scaler to save; empty without one."""
    if not scales_loss_dynamically(optimizer):
        return {}
    return {name: getattr(optimizer.loss_scaler, name) for name in LOSS_SCALING}


def set_loss_scaling(optimizer: EngineOptimizer, saved: Mapping[str, float]) -> None:
    """Restore a saved state of the dynamic loss scaler, if the optimizer has one."""
    if scales_loss_dynamically(optimizer):
        for name, value in saved.items():
            setattr(optimizer.loss_scaler, name, value)


def set_counters(engine: DeepSpeedEngine, steps: int, skipped: int) -> None:
    """Set an engine's counters to `steps` optimizer steps, `skipped` of them without an update."""
    engine.global_steps = steps
    engine.skipped_steps = skipped
    engine.global_samples = steps * engine.train_batch_size()
    # DeepSpeed derives from this counter which micro-batch ends a step: with a wrong one, ZeRO-2 and ZeRO-3 would
    # update in the middle of a step.
    engine.micro_steps = steps * engine.gradient_accumulation_steps()
