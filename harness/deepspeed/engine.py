"""Reach into DeepSpeed's engines: gradient norm, clipping, evaluation, loss scale, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.optim import Optimizer

from harness.deepspeed.flat_tensors import EngineOptimizer

LOSS_SCALING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The attributes of DeepSpeed's loss scaler that change while it runs."""
GRADIENTS = ("grad", "_hp_grad", "grad_accum")
"""Attributes of a parameter that may hold its gradient."""


def has_bf16_optimizer(engine: DeepSpeedEngine) -> bool:
    """Return whether DeepSpeed updates float32 copies of bf16 parameters without one of ZeRO's optimizers."""
    return isinstance(engine.optimizer, BF16_Optimizer)


def stepping_optimizer(engine: DeepSpeedEngine) -> Optimizer:
    """Return the torch optimizer that DeepSpeed's own optimizer wraps, if it has one."""
    optimizer: Optimizer = engine.basic_optimizer
    return optimizer


def inner_optimizers(engine: DeepSpeedEngine) -> list[Optimizer]:
    """Return the torch optimizers inside DeepSpeed's optimizer: two where a part of the states is offloaded."""
    found = [stepping_optimizer(engine), getattr(engine.optimizer, "backup_optimizer", None)]
    return [optimizer for optimizer in found if isinstance(optimizer, Optimizer)]


def clip_before_step(engine: DeepSpeedEngine, clip: Callable[[], Tensor], *, skip_nonfinite: bool) -> None:
    """Call `clip` just before the update, in an engine whose optimizer is a plain torch one.

    It replaces DeepSpeed's own clipping, which counts tied weights twice.

    Args:
        clip: clips all gradients; returns their norm before clipping (a scalar), which the engine then reports.
        skip_nonfinite: skip the update if that norm is not finite, and set the optimizer's attribute `overflow`. The
            host waits for the norm, except with a fused optimizer: its kernel skips the update on the device, and the
            caller that reads the norm later must call `count_skipped_step`.
    """
    optimizer: EngineOptimizer = stepping_optimizer(engine)
    update = optimizer.step
    optimizer.skips_itself = skip_nonfinite and bool(optimizer.defaults.get("fused"))

    @wraps(update)  # a learning-rate scheduler marks `step` with attributes, and warns where they are gone
    def step(*args: object, **kwargs: object) -> object:
        norm = clip()
        engine._global_grad_norm = norm
        if optimizer.skips_itself:
            # torch's fused kernels read `found_inf`, as GradScaler sets it, and change nothing where it is 1
            optimizer.overflow = False
            optimizer.found_inf = (~torch.isfinite(norm)).float()
            return update(*args, **kwargs)
        optimizer.overflow = skip_nonfinite and not bool(torch.isfinite(norm))
        return None if optimizer.overflow else update(*args, **kwargs)

    engine.clip_fp32_gradients = lambda: None  # DeepSpeed calls it just before `step`, and would clip by its own norm
    optimizer.step = step


def skips_nonfinite_itself(engine: DeepSpeedEngine) -> bool:
    """Return whether the optimizer's kernel skips an update if the norm is not finite; see `clip_before_step`."""
    return bool(getattr(engine.optimizer, "skips_itself", False))


def count_skipped_step(engine: DeepSpeedEngine) -> None:
    """Count the last step as skipped; the engine did not read the norm, so it does not know."""
    engine.skipped_steps += 1
    engine._step_applied = False


def sum_norm_with(
    optimizer: BF16_Optimizer, square_sum: Callable[[Iterable[Tensor], Iterable[Tensor], torch.device], Tensor]
) -> None:
    """Replace the bf16 optimizer's sum of squares of this rank's gradients, from which it takes the gradient norm.

    Args:
        square_sum: called with the gradients of dense parameters, the gradients of experts that are not on every
            data-parallel rank, and the device; returns the sum of the squares of all elements, a scalar on the device.
    """
    of_deepspeed = optimizer.get_grads_for_norm

    def grads_for_norm(for_clipping: bool = False) -> object:
        grads = of_deepspeed(for_clipping)
        if for_clipping:
            return grads
        dense, by_expert_group = grads
        device = optimizer.fp32_groups_flat_partition[0].device
        experts = [grad for found in by_expert_group.values() for grad in found]
        # Return the whole sum as one dense gradient: for experts DeepSpeed would call a second all-reduce over all
        # stages, which a stage without experts never joins. DeepSpeed squares the value, so return its root.
        return [square_sum(dense, experts, device).sqrt().view(1)], {}

    optimizer.get_grads_for_norm = grads_for_norm


def count_groups_alike(optimizer: EngineOptimizer, most: int) -> None:
    """Have ZeRO-1 call as many all-reduces for the gradient norm as the stage with `most` parameter groups.

    DeepSpeed calls one per group over all stages, so a stage with fewer groups (no experts, say) would miss the last
    ones, and the other stages would hang. Here it adds zeros in those.
    """
    of_deepspeed, missing = optimizer.scaled_global_norm, most - len(optimizer.bit16_groups)

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        found = [of_deepspeed(norm_type)]
        for _ in range(missing):
            if optimizer.cpu_offload:
                found.append(optimizer.complete_grad_norm_calculation_for_cpu_offload([]))
            else:
                found.append(optimizer.get_grad_norm_direct([], []))
        norm: Tensor = combine_grad_norm_groups(found, norm_type=norm_type)
        return norm

    if missing:
        optimizer.scaled_global_norm = scaled_global_norm


def is_counted_elsewhere(parameter: Tensor) -> bool:
    """Return whether an earlier stage holds the same tied parameter and counts it in the gradient norm."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def gradients_of(parameter: Tensor) -> Iterator[Tensor]:
    """Yield the gradients that a parameter (any shape) holds, each of its shape: torch's, the bf16 optimizer's in
    float32, and ZeRO-1's, which may have another precision."""
    for name in GRADIENTS:
        gradient: Tensor | None = getattr(parameter, name, None)
        if gradient is not None:
            yield gradient


def check_every_gradient(optimizer: EngineOptimizer) -> None:
    """Have DeepSpeed's ZeRO optimizers check gradients for infinities and NaN before an update in bf16 too."""
    if hasattr(optimizer, "check_grad_overflow"):
        optimizer.check_grad_overflow = True


def ask_the_norm_once(optimizer: EngineOptimizer) -> None:
    """Have ZeRO-1 and ZeRO-2 wait for the device once a step, for the gradient norm, instead of several times.

    DeepSpeed copies three results to the host: whether a gradient is not finite, whether their norm is not (which
    implies the first), and in clipping the norm again, once for each parameter group.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload or not optimizer.compute_grad_norm:
        return

    def no_overflow_yet(partition_gradients: bool = True) -> None:  # noqa: ARG001  # DeepSpeed passes it
        optimizer.overflow = False

    def clip(gradients: Sequence[Tensor | Sequence[Tensor]], norm: Tensor) -> None:
        scale = optimizer.loss_scale
        if optimizer.clip_grad > 0.0:  # a norm that is not finite is not handled here: DeepSpeed skips that step before
            # the norm is that of gradients times the loss scale; with clamp in place of `if`, the host need not wait
            scale = torch.clamp((norm / scale + 1e-6) / optimizer.clip_grad, min=1.0) * scale
        for gradient in gradients:
            for part in [gradient] if isinstance(gradient, Tensor) else gradient:
                part.data.mul_(1.0 / scale)

    optimizer._check_overflow = no_overflow_yet
    optimizer.unscale_and_clip_grads = clip


def evaluate_pipeline(engine: PipelineEngine, batches: Sequence[object], steps: int) -> Tensor:
    """Return the mean loss of `steps` micro-batches, a scalar that is equal on all ranks.

    Their shape may differ from training's. Nothing is logged: DeepSpeed would log each call as an evaluation.
    """
    monitored, engine.monitor.enabled = engine.monitor.enabled, False
    engine.reset_activation_shape()  # stages tell each other shapes only once, with the first tensor that they send
    loss: Tensor = engine.eval_batch(iter(batches), num_micro_batches=steps, bcast_loss=True)
    engine.reset_activation_shape()  # the next training step has its own shapes again
    engine.monitor.enabled = monitored
    engine.module.train()  # `eval_batch` leaves it in evaluation mode
    return loss


def forget_outputs(engine: PipelineEngine) -> None:
    """Free the last stage's outputs (logits) once their loss is known; DeepSpeed keeps them until the next ones."""
    outputs: list[object] = engine.pipe_buffers["outputs"]
    outputs[:] = [None] * len(outputs)


def scales_loss_dynamically(optimizer: EngineOptimizer) -> bool:
    """Return whether an engine's optimizer scales the loss dynamically (fp16)."""
    return bool(getattr(getattr(optimizer, "loss_scaler", None), "dynamic", False))


def loss_scaling(optimizer: EngineOptimizer) -> dict[str, float]:
    """Return the state of the dynamic loss scaler, to be saved; empty without one."""
    if not scales_loss_dynamically(optimizer):
        return {}
    return {name: getattr(optimizer.loss_scaler, name) for name in LOSS_SCALING}


def set_loss_scaling(optimizer: EngineOptimizer, saved: Mapping[str, float]) -> None:
    """Set the state of the dynamic loss scaler, if there is one, to a saved state."""
    if scales_loss_dynamically(optimizer):
        for name, value in saved.items():
            setattr(optimizer.loss_scaler, name, value)


def set_counters(engine: DeepSpeedEngine, steps: int, skipped: int) -> None:
    """Set an engine's counters to `steps` optimizer steps, `skipped` of them without an update."""
    engine.global_steps = steps
    engine.skipped_steps = skipped
    engine.global_samples = steps * engine.train_batch_size()
    engine.micro_steps = steps * engine.gradient_accumulation_steps()
