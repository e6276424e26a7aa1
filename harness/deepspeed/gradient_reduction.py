"""The data-parallel reduction of a step, in other hands than DeepSpeed's, or without its copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceGrads
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from harness.deepspeed.engine import accumulated_gradient
from harness.deepspeed.flat_tensors import EngineOptimizer


def trained_parameters(engine: PipelineEngine) -> list[nn.Parameter]:
    """Return the parameters of this stage that have gradients, in the module's order."""
    return [p for p in engine.module.parameters() if p.requires_grad and p.numel()]


def average_with(engine: PipelineEngine, average: Callable[[Sequence[Tensor], float], None]) -> None:
    """Have `average` replace the gradients by their means over the data-parallel ranks, once a step.

    Args:
        average: called with the gradients of the trained parameters, and the scale of the loss.
    """
    parameters, optimizer = trained_parameters(engine), engine.optimizer
    of_deepspeed: Callable[[PipelineEngine], None] = engine._INSTRUCTION_MAP[ReduceGrads]
    divided = isinstance(optimizer, DeepSpeedZeroOptimizer)
    of_bf16 = _bf16_gradients(optimizer) if isinstance(optimizer, BF16_Optimizer) else {}
    if divided:  # it takes the means apart as it would its own, and sends nothing
        optimizer.reduce_scatter = False
        optimizer.gradient_reduction_w_predivide = lambda tensor, _: tensor

    def run(self: PipelineEngine) -> None:
        gradients = [of_bf16[id(p)] if id(p) in of_bf16 else _gradient(p) for p in parameters]
        average(gradients, self._get_optimizer_loss_scale() or 1.0)
        if divided:
            of_deepspeed(self)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ReduceGrads: run}


def keep_own_gradients(engine: PipelineEngine) -> None:
    """Leave out the reduction of a rank without data-parallel neighbours, whose optimizer takes gradients as they are.

    DeepSpeed would copy them into a flat tensor of the size of the parameters, and back.
    """
    if isinstance(engine.optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)) or engine.has_moe_layers:
        return
    parameters = trained_parameters(engine)

    def run(_: PipelineEngine) -> None:
        for parameter in parameters:
            _gradient(parameter)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ReduceGrads: run}


def reduce_in_place(optimizer: EngineOptimizer) -> None:
    """Have ZeRO-1 and ZeRO-2 sum a bucket of gradients where it lies.

    DeepSpeed would copy the bucket into a second one, and the sums back.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    of_deepspeed: Callable[..., Tensor] = optimizer.allreduce_bucket

    def allreduce_bucket(bucket: Sequence[Tensor], *args: object, **kwargs: object) -> Tensor:
        whole = _joined(bucket)
        return of_deepspeed(bucket if whole is None else [whole], *args, **kwargs)

    optimizer.allreduce_bucket = allreduce_bucket


def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that lie one after the other in one memory as a flat one; None where they do not."""
    first = tensors[0]
    end = start = first.storage_offset()
    for tensor in tensors:
        here = tensor.untyped_storage()._cdata == first.untyped_storage()._cdata and tensor.storage_offset() == end
        if not here or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return None
        end += tensor.numel()
    return first.as_strided((end - start,), (1,))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient that a parameter has, or is given: another rank may have one."""
    found = accumulated_gradient(parameter)
    if found is None:
        found = torch.zeros_like(parameter)
        setattr(parameter, "grad_accum" if hasattr(parameter, "grad_accum") else "grad", found)
    return found


def _bf16_gradients(optimizer: BF16_Optimizer) -> dict[int, Tensor]:
    """Return what the optimizer steps by: a float32 gradient for each parameter, whether it was used or not."""
    pairs = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
    return {
        id(parameter): gradient
        for parameters, gradients in pairs
        for parameter, gradient in zip(parameters, gradients, strict=True)
    }
