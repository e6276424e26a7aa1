"""Find the gradients of a step where DeepSpeed's optimizers look for them, and replace how they are summed.

An optimizer reads a gradient in one of three places: `grad`, its own flat tensor in float32 (BF16_Optimizer), or
`grad_accum` (ZeRO-1, if gradients are accumulated in another precision than the parameters'). DeepSpeed silently
ignores a gradient in any other place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from deepspeed import comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceGrads, ReduceTiedGrads
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from harness.deepspeed.flat_tensors import EngineOptimizer
from harness.deepspeed.instructions import execute_by, executing, run_before


class StepGradients:
    """The gradients that an engine's optimizer will read in its next step."""

    def __init__(self, optimizer: EngineOptimizer) -> None:
        self._optimizer = optimizer
        self._accumulates = bool(getattr(optimizer, "use_grad_accum_attribute", False))
        self._attribute = "grad_accum" if self._accumulates else "grad"
        self._flat: dict[int, tuple[int, int]] = {}
        if isinstance(optimizer, BF16_Optimizer):
            groups = enumerate(optimizer.bf16_groups)
            self._flat = {id(p): (group, at) for group, members in groups for at, p in enumerate(members)}

    def found(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient, of the parameter's shape, to be changed in place; None if none was computed here."""
        position = self._flat.get(id(parameter))
        if position is None:
            found: Tensor | None = getattr(parameter, self._attribute, None)
            return found
        group, at = position
        if not self._optimizer.fp32_groups_has_gradients[group][at]:
            return None
        return self._in_float32(group, at).view_as(parameter)

    def of(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient, of the parameter's shape; create zeros if none was computed here.

        Another rank may have one, and then all ranks must take part in the sum.
        """
        found = self.found(parameter)
        if found is not None:
            return found
        position = self._flat.get(id(parameter))
        if position is not None:
            group, at = position
            # DeepSpeed leaves a parameter without this mark out of norm and clipping
            self._optimizer.fp32_groups_has_gradients[group][at] = True
            return self._in_float32(group, at).view_as(parameter)
        dtype = self._optimizer.gradient_accumulation_dtype if self._accumulates else parameter.dtype
        found = torch.zeros_like(parameter, dtype=dtype)
        setattr(parameter, self._attribute, found)
        return found

    def _in_float32(self, group: int, at: int) -> Tensor:
        gradient: Tensor = self._optimizer.fp32_groups_gradients[group][at]
        return gradient


def sum_tied_gradients(
    engine: PipelineEngine, sum_partial: Callable[[Callable[[nn.Parameter], Tensor | None]], None]
) -> None:
    """Sum the gradients of tied weights over the stages that hold them, once all gradients of a step are accumulated.

    Every stage calls the all-reduce for every tied weight, with zeros if it has no gradient. A stage may use only some
    weights of a shared block; without its zeros the other stages would wait for it forever.

    Args:
        sum_partial: called first, with a function that returns a parameter's gradient. It sums, over the
            tensor-parallel ranks, the gradients that are partial sums on each rank.
    """
    gradients = StepGradients(engine.optimizer)

    def run(self: PipelineEngine) -> None:
        sum_partial(gradients.found)
        for weight, group in self.module.get_tied_weights_and_groups():
            comm.all_reduce(gradients.of(weight), group=group)

    execute_by(engine, {ReduceTiedGrads: run})


def before_reduction(engine: PipelineEngine, act: Callable[[StepGradients], object]) -> None:
    """Have `act` called once a step, when all gradients of the step are accumulated and none is reduced yet.

    `ReduceTiedGrads` comes after the last backward pass and before any reduction; every stage executes it, also without
    tied weights.
    """
    run_before(engine, ReduceTiedGrads, partial(act, StepGradients(engine.optimizer)))


def trained_parameters(engine: PipelineEngine) -> list[nn.Parameter]:
    """Return the parameters of this stage that have gradients, in the module's order."""
    return [p for p in engine.module.parameters() if p.requires_grad and p.numel()]


def average_with(engine: PipelineEngine, average: Callable[[Sequence[Tensor], float], None]) -> None:
    """Have `average` replace the gradients by their means over the data-parallel ranks, once a step.

    Args:
        average: called with the gradients of the trained parameters, each in its parameter's shape, and the loss scale.
    """
    parameters, optimizer = trained_parameters(engine), engine.optimizer
    of_deepspeed = executing(engine, ReduceGrads)
    divided, gradients = isinstance(optimizer, DeepSpeedZeroOptimizer), StepGradients(optimizer)
    if divided:  # ZeRO-1 still has to copy each rank's share of the means to its own tensors, but must send nothing
        optimizer.reduce_scatter = False
        optimizer.gradient_reduction_w_predivide = lambda tensor, _: tensor

    def run(self: PipelineEngine) -> None:
        average([gradients.of(p) for p in parameters], self._get_optimizer_loss_scale() or 1.0)
        if divided:
            of_deepspeed(self)

    execute_by(engine, {ReduceGrads: run})


def give_every_gradient(engine: PipelineEngine) -> None:
    """Give a gradient of zeros to each trained parameter that has none in a step: another rank may have one.

    ZeRO-1 reduces only the gradients that exist, so ranks that have used different parameters would hang.
    """
    if not isinstance(engine.optimizer, BF16_Optimizer):  # it has a flat float32 gradient for every parameter
        parameters = trained_parameters(engine)
        before_reduction(engine, lambda gradients: [gradients.of(parameter) for parameter in parameters])


def keep_own_gradients(engine: PipelineEngine) -> None:
    """Skip the reduction on a rank that has no data-parallel peers and a plain torch optimizer.

    DeepSpeed would copy the gradients into a flat tensor of the size of all parameters, and back.
    """
    if isinstance(engine.optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)) or engine.has_moe_layers:
        return
    parameters, gradients = trained_parameters(engine), StepGradients(engine.optimizer)

    def run(_: PipelineEngine) -> None:
        for parameter in parameters:
            # called for its effect: it creates zeros for a missing gradient, as DeepSpeed's reduction does
            gradients.of(parameter)

    execute_by(engine, {ReduceGrads: run})


def reduce_in_place(optimizer: EngineOptimizer) -> None:
    """Have ZeRO-1 and ZeRO-2 all-reduce a bucket of gradients in place.

    DeepSpeed flattens the bucket into a second one and copies the sums back. Flattening one tensor copies nothing, so
    neighbours in memory are handed over as one tensor.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    of_deepspeed: Callable[..., Tensor] = optimizer.allreduce_bucket

    def allreduce_bucket(bucket: Sequence[Tensor], *args: object, **kwargs: object) -> Tensor:
        whole = _joined(bucket)
        return of_deepspeed(bucket if whole is None else [whole], *args, **kwargs)

    optimizer.allreduce_bucket = allreduce_bucket


def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that are adjacent in one storage as one flat view of it; None if they are not."""
    first = tensors[0]
    end = start = first.storage_offset()
    for tensor in tensors:
        here = tensor.untyped_storage()._cdata == first.untyped_storage()._cdata and tensor.storage_offset() == end
        if not here or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return None
        end += tensor.numel()
    return first.as_strided((end - start,), (1,))
