"""Change what an engine does with gradients before the update: clipping, compression, no decay of unused parameters.

Each function changes a newly built DeepSpeed engine; `patches.py` has their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.config import Resolved
from harness.console import Console
from harness.deepspeed.engine import (
    clip_before_step,
    count_groups_alike,
    has_bf16_optimizer,
    inner_optimizers,
    is_counted_elsewhere,
    sum_norm_with,
)
from harness.deepspeed.expert_groups import is_expert
from harness.deepspeed.flat_tensors import run_of_each
from harness.deepspeed.gradient_reduction import StepGradients, average_with, before_reduction, trained_parameters
from harness.parallel.gradients.compressed import ALIGNED, EXACT, PACKED, CompressedReduction, measure, wire_share
from harness.parallel.tensor.shard import shard_of
from harness.topology.agreement import values_of_all
from harness.topology.groups import Groups

BLOCK = 2**20
"""Elements that are summed at once: on a CPU torch copies them to float64."""


def correct_clipping(engine: DeepSpeedEngine, groups: Groups, *, skip_nonfinite: bool) -> None:
    """Make `engine` clip by the exact global norm, with each parameter counted once, and keep that norm.

    Args:
        skip_nonfinite: if the norm is not finite, make a plain torch optimizer skip the update and set its attribute
            `overflow`, as DeepSpeed's own optimizers do. All ranks have the same norm, so all of them skip.
    """
    if has_bf16_optimizer(engine):
        sum_norm_with(engine.optimizer, partial(square_sum_of_data_ranks, groups=groups))
    elif not engine.zero_optimization():
        clip_before_step(engine, partial(_clip, engine, groups), skip_nonfinite=skip_nonfinite)
    elif groups.layout.pp_size > 1:
        count_groups_alike(engine.optimizer, max(values_of_all(len(engine.optimizer.param_groups))))


def gradient_norm(parameters: Iterable[nn.Parameter], groups: Groups, device: torch.device) -> Tensor:
    """Return the Euclidean norm of the whole model's gradients, a float64 scalar on `device`; all ranks call it."""
    counted = [p for p in parameters if _counts(p, groups.coordinate.tp_rank)]
    dense, experts = ([p.grad for p in counted if p.grad is not None and is_expert(p) is e] for e in (False, True))
    total = square_sum_of_data_ranks(dense, experts, device, groups)
    # first within each stage, so that its tensor-parallel ranks bring the same value to the sum over the stages
    for group in (groups.tp_group, groups.pp_group):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total.sqrt()


def square_sum_of_data_ranks(
    dense: Iterable[Tensor], experts: Iterable[Tensor], device: torch.device, groups: Groups
) -> Tensor:
    """Return the sum of squares over all data-parallel ranks, a float64 scalar as of `square_sum`; all ranks call it.

    Args:
        dense: tensors that are equal on all data-parallel ranks; counted once.
        experts: tensors of this rank's own experts; summed over the ranks over which experts are distributed.
    """
    total = square_sum(experts, device)
    if groups.ep_group is not None:
        dist.all_reduce(total, group=groups.ep_group)
    # added after the all-reduce, which would count them once for each rank
    return total + square_sum(dense, device)


def square_sum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, a float64 scalar on `device`; 0 without tensors.

    In float64 the terms' grouping, which differs by layout, changes the result by far less than float32's precision.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        for block in tensor.detach().reshape(-1).split(BLOCK):
            total += torch.linalg.vector_norm(block, dtype=torch.float64).square()
    return total


def _clip(engine: DeepSpeedEngine, groups: Groups) -> Tensor:
    """Scale all gradients so that their norm is at most the engine's limit; return the norm before."""
    norm = gradient_norm(engine.module.parameters(), groups, engine.device)
    limit = engine.gradient_clipping()
    if limit:  # always multiply, perhaps by 1: `if norm > limit` would make the host wait for the device
        # 1e-6 as in torch's clip_grad_norm_: no division by zero
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0).float()
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return norm


def _counts(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Return whether this rank counts the parameter in the norm: its own shard, or a whole parameter on tp_rank 0."""
    if is_counted_elsewhere(parameter):
        return False
    return tp_rank == 0 or getattr(parameter, "tensor_model_parallel", False)


def settle_compression(resolved: Resolved, groups: Groups, device: torch.device, console: Console) -> Resolved:
    """Return the config with the bits of gradient compression, measured if "auto", and report it; all ranks call it."""
    bits = resolved.gradient_bits
    if groups.layout.dp_size == 1:
        return replace(resolved, gradient_bits=0)
    if bits is None:
        found = measure(groups.dp_group, device)
        console.say(str(found))
        return replace(resolved, gradient_bits=found.bits)
    if bits:
        console.say(f"gradient compression: {bits} bits, {wire_share(bits):.3f} of the bytes of float32")
    return resolved


def compress_gradients(
    engine: PipelineEngine, groups: Groups, bits: int | None, device: torch.device
) -> CompressedReduction | None:
    """Make a pipeline engine average gradients in `bits` bits; None for 0 bits or a single data rank."""
    if not bits or groups.dp_group is None:
        return None
    parameters = trained_parameters(engine)
    tied = {id(p) for weights in engine.module.tied_modules.values() for p in weights.parameters()}
    reduction = CompressedReduction(
        bits=bits,
        group=groups.dp_group,
        device=device,
        sizes=[p.numel() for p in parameters],
        kinds=[_kind(p, is_tied=id(p) in tied) for p in parameters],
    )
    average_with(engine, reduction.average)
    return reduction


def _kind(parameter: nn.Parameter, *, is_tied: bool) -> str:
    """Return how a gradient is packed, so that ranks with copies of a weight round it to the same mean.

    Rounding depends on the other values in a block, so copies of a weight need equal neighbours on all ranks.
    PACKED gradients are adjacent: weights that all tensor-parallel ranks hold whole, in the same order. ALIGNED ones
    begin a new block: tied weights, whose neighbours differ by stage, and shards, whose values differ by rank. EXACT
    ones are not rounded: shards that overlap with those of other ranks.
    """
    shard = shard_of(parameter)
    if shard is not None and shard.copied:
        return EXACT
    return ALIGNED if is_tied or shard is not None else PACKED


class UnusedParameters:
    """Keeps parameters that never had a gradient unchanged; all ranks create one.

    DeepSpeed gives every parameter a gradient, of zeros if need be, so its optimizers apply weight decay to parameters
    that no sample uses. torch's optimizers leave parameters without a gradient alone.

    Attributes:
        names: id of a trained parameter on this rank -> its name; a tied parameter has the same name on all stages.
        used: names of those that had a gradient on this rank in the first step.
        pieces: id of a tensor that the optimizer updates -> (first element, length, whether it has since had a
            gradient) of each unused parameter in it.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        """Register the hooks that record which parameters get a gradient in the first step."""
        self.names = _names(engine.module)
        self.used: set[str] = set()
        self.pieces: dict[int, list[tuple[int, int, Tensor]]] = {}
        self._engine = engine
        self._agreed = False
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        if isinstance(engine, PipelineEngine):  # schedules defer weight gradients, so autograd's hooks run without any
            before_reduction(engine, self._look)
        else:
            for parameter in engine.module.parameters():
                if id(parameter) in self.names:
                    self._note_first(parameter)
        for optimizer in inner_optimizers(engine):
            optimizer.register_step_pre_hook(self._keep)
            optimizer.register_step_post_hook(self._put_back)

    def _look(self, gradients: StepGradients) -> None:
        """Agree on unused parameters: after the last backward pass of the first step, before the reduction."""
        if not self._agreed:
            trained = (p for p in self._engine.module.parameters() if id(p) in self.names)
            self.used |= {self.names[id(p)] for p in trained if gradients.found(p) is not None}
            self._agree()

    def _note_first(self, parameter: nn.Parameter) -> None:
        def note(used: Tensor) -> None:
            self.used.add(self.names[id(used)])
            handle.remove()

        handle = parameter.register_post_accumulate_grad_hook(note)

    def _agree(self) -> None:
        """Find the parameters that no rank has used; all ranks call it, with two collectives of names only."""
        self._agreed = True
        # Two rounds: first the names that some rank has not used, usually none; then which of them another has used.
        somewhere = {name for row in values_of_all(sorted(set(self.names.values()) - self.used)) for name in row}
        if not somewhere:  # all ranks know the same
            return
        unused = somewhere - {name for row in values_of_all(sorted(somewhere & self.used)) for name in row}
        for tensor, run in run_of_each(self._engine.optimizer):
            if run.length and self.names.get(id(run.parameter)) in unused:
                used = torch.zeros((), dtype=torch.bool, device=tensor.device)
                self.pieces.setdefault(id(tensor), []).append((run.offset, run.length, used))

    @torch.no_grad()
    def _keep(self, optimizer: Optimizer, *_: object) -> None:
        """Copy the unused parameters that the next optimizer step would decay."""
        if not self._agreed:
            self._agree()
        for values, gradient, used in self._unused_in(optimizer):
            # DeepSpeed fills in zeros, so any other value (also NaN) shows that a sample has used the parameter. The
            # answer stays on the device.
            used |= gradient.count_nonzero() > 0
            self._before.append((values, values.clone(), used))

    @torch.no_grad()
    def _put_back(self, *_: object) -> None:
        """Restore the unused parameters after the optimizer step."""
        for values, before, used in self._before:
            values.copy_(torch.where(used, values, before))
        self._before.clear()

    def _unused_in(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (values, gradient, used) of each piece that the optimizer is about to decay."""
        for group in optimizer.param_groups if self.pieces else ():
            for tensor in group["params"] if group.get("weight_decay") else ():
                for offset, length, used in self.pieces.get(id(tensor), ()):
                    if tensor.grad is not None:
                        yield _piece(tensor.data, offset, length), _piece(tensor.grad, offset, length), used


def _piece(tensor: Tensor, offset: int, length: int) -> Tensor:
    return tensor if length == tensor.numel() else tensor.view(-1)[offset : offset + length]


def _names(module: nn.Module) -> dict[int, str]:
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    for key, weights in getattr(module, "__dict__", {}).get("tied_modules", {}).items():
        for index, parameter in enumerate(weights.parameters()):
            if id(parameter) in names:
                names[id(parameter)] = f"{key}[{index}]"
    return names
