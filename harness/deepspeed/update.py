"""The update of a step, in the order in which it happens: from the last backward pass to the new weights.

`StagedEngine` is the page to read: ZeRO-0 and ZeRO-1, with any number of pipeline stages. DeepSpeed's engine executes
the three instructions that end a step, each by a method here. The adapters below it correct DeepSpeed's own optimizers:
ZeRO-2 (and ZeRO-1 with offloaded states or in fp16), and ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from deepspeed import comm
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.deepspeed.construction import ConstructedEngine
from harness.deepspeed.engine import inner_optimizers
from harness.deepspeed.expert_groups import is_expert
from harness.deepspeed.flat_optimizer import FlatOptimizer
from harness.deepspeed.gradient_norm import counts, global_norm
from harness.deepspeed.kept_in_fp32 import is_kept
from harness.deepspeed.overlap import AwaitedWeights, OverlappedMeans
from harness.deepspeed.schedule import Schedule, ScheduledEngine, StageProgram
from harness.deepspeed.step_gradients import StepGradients, trained_parameters
from harness.deepspeed.unused_parameters import UnusedParameters
from harness.topology.agreement import all_gather_object
from harness.topology.groups import Groups, second_data_groups


def clip(gradients: Sequence[Tensor], norm: Tensor, limit: float, loss_scale: float = 1.0) -> None:
    """Scale gradients in place so that the norm of the whole model's gradient is at most `limit`.

    Args:
        gradients: the gradients from which this rank updates weights: whole ones, slices, or parts of slices.
        norm: gradient norm of the whole model times `loss_scale`, a scalar on the device.
        limit: largest norm; 0 disables clipping.
        loss_scale: divides the gradients (fp16).
    """
    if gradients and (limit or loss_scale != 1.0):
        torch._foreach_mul_(list(gradients), (1.0 / clipping_divisor(norm, limit, loss_scale)).float())


def clipping_divisor(norm: Tensor, limit: float, loss_scale: float = 1.0) -> Tensor:
    """Return the divisor of gradients in `clip`, a scalar on the device."""
    if not limit:
        return torch.full_like(norm, loss_scale)
    # `clamp` and not `if norm > limit`, for which the host would wait for the device; 1e-6 as in torch's
    # clip_grad_norm_, so that there is no division by zero
    return torch.clamp((norm / loss_scale + 1e-6) / limit, min=1.0) * loss_scale


class Compression(Protocol):
    """A reduction that sends gradients in a few bits, and carries the rounding error to the next step."""

    def average(self, gradients: Sequence[Tensor], scale: float = 1.0) -> None:
        """Replace gradients by their means over the data-parallel ranks, in place."""

    @property
    def description(self) -> str:
        """A text that is equal for two reductions if one can continue from the other's `state`."""

    def state(self) -> dict[str, Tensor]:
        """Return this rank's state to save, by name."""

    def set_state(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from a `state`."""

    def reset(self) -> None:
        """Forget the accumulated rounding error."""


@dataclass(frozen=True, kw_only=True)
class UpdateParts:
    """The inputs of an update besides DeepSpeed's engine.

    Attributes:
        sum_partial: sums the gradients that are partial on each tensor-parallel rank; called with a function that
            returns a parameter's gradient.
        is_partial: whether a parameter has a partial gradient; known after the first forward pass.
        skips_nonfinite: whether a step with a non-finite gradient changes no weight.
        overlaps: whether to average gradients during the last backward pass of a step.
        compression: averages gradients over the data-parallel ranks instead of DeepSpeed; None without compression.
        reading: begins to copy scalars to the host; returns a function that waits for them.
    """

    groups: Groups
    sum_partial: Callable[[Callable[[nn.Parameter], Tensor | None]], None]
    is_partial: Callable[[nn.Parameter], bool]
    skips_nonfinite: bool
    overlaps: bool = True
    compression: Compression | None = None
    reading: Callable[[Sequence[Tensor]], Callable[[], list[float]]] | None = None


class StagedEngine(ConstructedEngine, ScheduledEngine):
    """One or more pipeline stages, with ZeRO-0 or ZeRO-1.

    Attributes:
        skips_on_device: whether the device itself skips an update with a non-finite gradient, which this engine then
            counts as made.
        outcome: returns norm, mean loss and other losses of the last step, waiting for these but not for the update;
            None if DeepSpeed's own optimizer made the step.
    """

    skips_on_device = False
    outcome: Callable[[], list[float]] | None = None

    def __init__(self, parts: UpdateParts, schedule: Schedule, **of_deepspeed: object) -> None:
        super().__init__(schedule, **of_deepspeed)
        self.parts = parts
        self.trained = trained_parameters(self.module)
        self.gradients = StepGradients(self.optimizer)
        self.unused = UnusedParameters(self.module, self.optimizer)
        self._has_stepped = False
        self._sums_partial = True  # until the first step has shown which gradients are partial
        self.means: OverlappedMeans | None = None
        self.weights: AwaitedWeights | None = None
        if isinstance(self.optimizer, FlatOptimizer):
            layers = self.module.chunk_layers()
            # Collectives of one group run in order: in a group of their own, weights do not delay gradients or norms.
            self.optimizer.gather_over(second_data_groups(parts.groups))
            self.weights = AwaitedWeights(self.optimizer, layers)
            # Compression averages the complete gradients of a step, so nothing can be reduced during a backward pass.
            if parts.compression is None:
                self.means = OverlappedMeans(self.optimizer, layers, self.gradients.fill, self._is_last_pass)
        self.overlaps = parts.overlaps
        if isinstance(self.optimizer, DividedOptimizer):
            self.optimizer.prepare(skips_nonfinite=parts.skips_nonfinite, compressed=parts.compression is not None)
            # The norm takes one all-reduce over stages per group, and stages may have different numbers of groups.
            self.optimizer.most_groups = max(all_gather_object(len(self.optimizer.param_groups)))

    def train_batch(self, data_iter: Iterator[object] | None = None) -> Tensor:
        """Run a step on the iterator's micro-batches; return the mean loss, a scalar equal on all ranks."""
        if self.wall_clock_breakdown():
            loss: Tensor = super().train_batch(data_iter)  # with DeepSpeed's timers and their report
            return loss
        # DeepSpeed's `train_batch` without its timers, which synchronise with the device.
        self.set_dataiterator(data_iter)
        self.module.train()
        self.total_loss = self.total_additional_losses = None
        self._exec_schedule(self._train_schedule())
        mean: Tensor = self.agg_train_loss  # by the last instruction
        return mean

    # During the passes: the first forward pass waits for the weights of the last update, layer by layer. Averaging over
    # data-parallel ranks begins in the backward pass of the last micro-batch.

    def _train_schedule(self) -> StageProgram:
        if self.weights is not None:
            self.optimizer.await_weights(self.weights.before_layers)
            self.optimizer.forget_sums()
        if self.means is not None:
            # Not in the first step, which finds unused parameters and partial gradients, and not if weight gradients
            # are deferred past the watched backward pass.
            overlaps = self.overlaps and self._has_stepped and not self.schedule.defers
            self.means.begin_step(self._summed_first, overlaps=overlaps)
        return super()._train_schedule()

    def _inference_schedule(self, micro_batches: int) -> StageProgram:
        self.await_weights()
        return super()._inference_schedule(micro_batches)

    def await_weights(self) -> None:
        """Wait until this rank has the weights of the last update; all ranks call it."""
        if self.weights is not None:
            self.optimizer.await_weights()

    def abandon_weights(self) -> None:
        """Wait for the weights in flight to this rank, and send no others, which would not be read."""
        if self.weights is not None:
            self.optimizer.abandon_weights()

    def _is_last_pass(self) -> bool:
        """Return whether the last micro-batch of a step passes forwards, or backwards, which may recompute layers."""
        return bool(self.module.training) and self.micro_batch == self.micro_batches - 1

    def _summed_first(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are summed over stages or tensor-parallel ranks."""
        tied = [weight for weight, _ in self.module.get_tied_weights_and_groups()]
        return tied + [parameter for parameter in self.trained if self.parts.is_partial(parameter)]

    # The instruction ReduceTiedGrads, after the last backward pass of a step: sums within the model.

    def _exec_reduce_tied_grads(self) -> None:
        # Before missing gradients become zeros: torch's optimizers skip parameters without a gradient, but DeepSpeed's
        # would apply weight decay to them.
        if not self._has_stepped:
            self.unused.find(self.gradients.found)
        # Ranks may have used different parameters. If each reduced only its existing gradients, ranks would call
        # different collectives, and hang.
        self.gradients.fill(self.trained)
        # Gradients that are partial on each tensor-parallel rank, in one all-reduce per step.
        if self._sums_partial:
            self.parts.sum_partial(self.gradients.found)
        # Tied weights: every stage joins the all-reduce, with zeros if it has no gradient. DeepSpeed would reduce
        # `grad`, which most of its optimizers do not read, and skip missing gradients.
        for weight, group in self.module.get_tied_weights_and_groups():
            comm.all_reduce(self.gradients.of(weight), group=group)

    # ReduceGrads: means over the data-parallel ranks.

    def _exec_reduce_grads(self) -> None:
        if self.parts.compression is not None:
            # The rounding error carried over from the last step has that step's loss scale, which may have changed.
            scale = self._get_optimizer_loss_scale() or 1.0
            self.parts.compression.average([self.gradients.of(parameter) for parameter in self.trained], scale)
        if self.means is not None:
            self.means.finish()  # a reduce_scatter of each parameter group, unless already begun
        elif isinstance(self.optimizer, DividedOptimizer):
            # DeepSpeed averages, unless compression has, and keeps this rank's partition.
            super()._exec_reduce_grads()
        elif self.parts.compression is None and self.parts.groups.dp_group is not None:
            # DeepSpeed's all_reduce of all gradients, in buckets.
            super()._exec_reduce_grads()
        # Otherwise there is one data-parallel rank, or compression has averaged. DeepSpeed would still copy all
        # gradients to a flat tensor and back.

    # OptimizerStep: the mean loss, norm, clipping, the update or nothing, and counters.

    @torch.no_grad()
    def _exec_optimizer_step(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        # Before the update, after which new weights keep the links between hosts busy.
        self.agg_train_loss = self._aggregate_total_loss()
        super()._exec_optimizer_step(lr_kwargs)

    def _aggregate_total_loss(self) -> Tensor:
        """Return the mean loss of a step on all ranks, a scalar; DeepSpeed keeps the other losses of the model."""
        if self.is_last_stage():
            mean: Tensor = super()._aggregate_total_loss()
            return mean
        # DeepSpeed would copy zeros from the host here, and wait for the copy. The values come in the order in which
        # its last stage sends them: the loss on its data rank, the mean over data ranks, the others.
        names = list(self.module.get_additional_losses() or ())
        losses = torch.zeros(2 + len(names), device=self.device)
        comm.broadcast(losses, src=self._loss_stage_global_rank(), group=self.grid.get_pipe_parallel_group())
        self.dp_group_loss, mean, *others = losses.unbind()
        if names:
            self.agg_additional_losses = dict(zip(names, others, strict=True))
        return mean

    @torch.no_grad()
    def _take_model_step(self, lr_kwargs: Mapping[str, object] | None) -> None:
        # DeepSpeed's own optimizers for ZeRO-1 with offloaded states, for fp16, and for bf16 without float32 sums
        # reduce, clip and update by themselves, as does torch's autocast in fp16.
        is_plain = isinstance(self.optimizer, (FlatOptimizer, Optimizer))
        if self.torch_autocast_z0_gradscaler is not None or not is_plain:
            with self.unused.kept(inner_optimizers(self)):
                super()._take_model_step(lr_kwargs)  # norm, clipping, update and zeroing are inside the optimizer
            return
        norm = self._norm()
        self._global_grad_norm = norm
        if self.parts.reading is not None:
            # Before the update is queued: while the device runs it, the host can already queue the next forward pass.
            others = (self.get_additional_losses() or {}).values()
            self.outcome = self.parts.reading([norm, self.agg_train_loss, *others])
        applied = True
        # torch sets this on its fused optimizers, which take a scale of the gradients and a flag to skip the step.
        if getattr(self.basic_optimizer, "_step_supports_amp_scaling", False):
            self._clip_and_skip_on_device(norm)
        else:
            clip(self._stepped_gradients(), norm, self.gradient_clipping())
            # The host waits for the device.
            applied = not self._skips_nonfinite or bool(torch.isfinite(norm))
        if applied:
            with self.unused.kept([self.basic_optimizer]) if self.unused.pieces else nullcontext():
                if self.weights is None:
                    self.optimizer.step()
                else:
                    self.optimizer.update(self.weights.order)  # an optimizer.step() for each parameter group
        # With overlap the next forward pass waits for the other ranks' weights, layer by layer.
        if not self.overlaps:
            self.await_weights()
        # With flat sums nothing is zeroed: the next step's first gradients overwrite them, see `forget_sums`.
        if self.weights is None:
            self.zero_grad()
        self._count_step(applied, lr_kwargs)

    def _clip_and_skip_on_device(self, norm: Tensor) -> None:
        """Let torch's fused optimizer clip as it reads gradients, and change nothing if the norm is not finite."""
        # The host does not wait. So whoever reads the norm must call `count_skipped_step` for a skipped step.
        optimizer = self.basic_optimizer
        limit = self.gradient_clipping()
        # torch's GradScaler sets the same two attributes; the fused kernel reads both as float32, and divides by the
        # second.
        optimizer.found_inf = (~torch.isfinite(norm)).float() if self._skips_nonfinite else None
        self.skips_on_device = self._skips_nonfinite
        inside = bool(limit) and self._clips_inside
        optimizer.grad_scale = clipping_divisor(norm, limit).float() if inside else None
        if not inside:
            clip(self._stepped_gradients(), norm, limit)

    @cached_property
    def _clips_inside(self) -> bool:
        # On a CPU, a separate multiplication gives the same bits as other layouts, and takes no longer.
        return bool(self.device.type != "cpu")

    def _stepped_gradients(self) -> list[Tensor]:
        """Return the gradients from which this rank updates weights: whole ones, or its flat slices."""
        if isinstance(self.optimizer, FlatOptimizer):
            return self.optimizer.slices
        return [p.grad for p in self.trained if p.grad is not None]

    @cached_property
    def _skips_nonfinite(self) -> bool:
        # DeepSpeed's optimizers for ZeRO-1 and bf16 always skip.
        return self.parts.skips_nonfinite or isinstance(self.optimizer, FlatOptimizer)

    def _norm(self) -> Tensor:
        """Return the whole model's gradient norm before clipping, a float64 scalar; all ranks call it."""
        # DeepSpeed would count a tied weight on each stage that holds it, count weights replicated over tensor-parallel
        # ranks only on the first stage, and sum squares in float32.
        groups = self.parts.groups
        if isinstance(self.optimizer, FlatOptimizer):
            # Compressed means are whole on every rank, but counting only the rank's slice gives the same sum.
            return global_norm(*self._slices, groups, self.device, divided=True)
        dense, experts = self._counted
        return global_norm(map(self.gradients.of, dense), map(self.gradients.of, experts), groups, self.device)

    @cached_property
    def _slices(self) -> tuple[list[Tensor], list[Tensor]]:
        """The slices of flat gradients that this rank counts in the norm: dense ones and expert ones."""
        found: tuple[list[Tensor], list[Tensor]] = self.optimizer.gradients_in_norm(
            self.parts.groups.coordinate.tp_rank
        )
        return found

    @cached_property
    def _counted(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters that this rank counts in the norm: dense ones and experts."""
        counted = [p for p in self.trained if counts(p, self.parts.groups.coordinate.tp_rank)]
        return [p for p in counted if not is_expert(p)], [p for p in counted if is_expert(p)]

    def _count_step(self, applied: bool, lr_kwargs: Mapping[str, object] | None) -> None:
        """Count a step, and like DeepSpeed advance the learning-rate schedule if weights have changed."""
        if not self._has_stepped:
            # Known only now: the first forward pass finds out which gradients are partial. All ranks of a group decide
            # alike, or they would hang.
            tensor_parallel = self.parts.groups.tp_group is not None
            self._sums_partial = tensor_parallel or any(map(self.parts.is_partial, self.trained))
        self._has_stepped = True
        self._step_applied = applied
        if not applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            try:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            except TypeError:
                # ReduceLROnPlateau needs an argument, and DeepSpeed gives it this one.
                self.lr_scheduler.step(self.train_batch_size())
        self.losses = None
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        every = self.steps_per_print()
        if every and self.global_rank == 0 and self.global_steps % every == 0:
            self._report_progress(self.global_steps)


class WholeEngine(ConstructedEngine, DeepSpeedEngine):
    """All layers on every rank, with ZeRO-2 or ZeRO-3.

    DeepSpeed's optimizers reduce gradients with hooks during each backward pass, and unscale, clip and update in their
    `step`. `DividedOptimizer` and `Stage3Optimizer` correct parts of both.
    """

    skips_on_device = False
    outcome = None

    def __init__(self, *, skips_nonfinite: bool, reduces_once: bool = False, **of_deepspeed: object) -> None:
        super().__init__(**of_deepspeed)
        self.unused = UnusedParameters(self.module, self.optimizer)
        self.unused.note_first_gradients()
        if isinstance(self.optimizer, DividedOptimizer):
            self.optimizer.prepare(skips_nonfinite=skips_nonfinite, reduces_once=reduces_once)
        elif skips_nonfinite and hasattr(self.optimizer, "check_grad_overflow"):
            # By default ZeRO-3 checks only in fp16.
            self.optimizer.check_grad_overflow = True

    def _take_model_step(self, lr_kwargs: Mapping[str, object] | None) -> None:
        if isinstance(self.optimizer, DividedOptimizer) and self.optimizer.reduces_once:
            self.optimizer.reduce_sums()
        with self.unused.kept(inner_optimizers(self)):
            super()._take_model_step(lr_kwargs)


class DividedOptimizer(DeepSpeedZeroOptimizer):
    """The optimizer of ZeRO-2, and of ZeRO-1 with offloaded states or in fp16.

    Attributes:
        asks_once: whether a step waits for the device once, for the norm, which is finite only if all gradients are.
            DeepSpeed copies three results to the host: whether a gradient is non-finite, whether the norm is, and in
            clipping the norm again, once for each parameter group.
        compressed: whether gradients are already means over the data-parallel ranks.
        most_groups: largest number of parameter groups of any stage.
        reduces_once: whether ZeRO-2 reduces the sums of a step instead of the gradients of each micro-batch.
    """

    asks_once = False
    compressed = False
    most_groups = 0
    reduces_once = False

    def prepare(self, *, skips_nonfinite: bool, compressed: bool = False, reduces_once: bool = False) -> None:
        """Set the run's options."""
        self.reduces_once = reduces_once
        if skips_nonfinite:
            # By default, DeepSpeed checks only in fp16.
            self.check_grad_overflow = True
        # With offloading, DeepSpeed reads the norm of each parameter on the host anyway.
        self.asks_once = skips_nonfinite and not self.cpu_offload and self.compute_grad_norm
        self.compressed = compressed
        if compressed:
            # With a reduce-scatter, DeepSpeed would not call `gradient_reduction_w_predivide`, which skips the
            # averaging.
            self.reduce_scatter = False

    # Called by hooks for each complete gradient and after each backward pass: DeepSpeed reduces in every micro-batch.

    def process_gradients(self, param: nn.Parameter, i: int) -> None:
        """Put a gradient into a bucket to reduce, or leave it in the sum over the step's micro-batches."""
        if not self.reduces_once:
            super().process_gradients(param, i)
        # Otherwise autograd has added it to `grad`.
        elif self.use_grad_accum_attribute:
            self._fill_param_grad_accum_attribute(param)

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Reduce the rest of a micro-batch's gradients, unless they are reduced once per step."""
        if not self.reduces_once:
            super().overlapping_partition_gradients_reduce_epilogue()

    def reduce_sums(self) -> None:
        """Average a step's sums over the data-parallel ranks, bucket by bucket; each rank keeps its partition."""
        # DeepSpeed allocates its buckets before the first gradient of a micro-batch, in `process_gradients`, which here
        # has not passed any on.
        self.setup_buckets()
        for i, group in enumerate(self.bit16_groups):
            for param in group:
                # Another rank may have used the parameter, and all ranks reduce it.
                if self.get_gradient_for_reduction(param) is None:
                    missing = torch.zeros_like(param, dtype=self.gradient_accumulation_dtype)
                    setattr(param, "grad_accum" if self.use_grad_accum_attribute else "grad", missing)
                self.reduce_ready_partitions_and_remove_grads(param, i)
        super().overlapping_partition_gradients_reduce_epilogue()

    def _fill_param_grad_accum_attribute(self, param: nn.Parameter) -> None:
        """Add a gradient to its sum in one operation; DeepSpeed would first convert it to a new tensor."""
        total: Tensor | None = getattr(param, "grad_accum", None)  # DeepSpeed's own attribute
        if param.grad is not None and total is not None:
            total.add_(param.grad.view(total.shape))
            param.grad = None
        else:
            super()._fill_param_grad_accum_attribute(param)

    def allreduce_bucket(self, bucket: Sequence[Tensor], *args: object, **kwargs: object) -> Tensor:
        """Reduce a bucket in place if its gradients are adjacent in memory; DeepSpeed would copy it there and back."""
        whole = joined(bucket)
        reduced: Tensor = super().allreduce_bucket(bucket if whole is None else [whole], *args, **kwargs)
        return reduced

    def gradient_reduction_w_predivide(self, tensor: Tensor, communication_data_type: torch.dtype) -> Tensor:
        """Average a bucket over the data-parallel ranks, unless compression has."""
        if self.compressed:
            return tensor
        averaged: Tensor = super().gradient_reduction_w_predivide(tensor, communication_data_type)
        return averaged

    def _check_overflow(self, partition_gradients: bool = True) -> None:
        if self.asks_once:
            # The norm will show an overflow.
            self.overflow = False
        else:
            super()._check_overflow(partition_gradients)

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """Return the gradient norm times the loss scale, with equally many collectives on each stage."""
        found = [super().scaled_global_norm(norm_type)]
        # DeepSpeed calls one all-reduce over all stages for each parameter group. A stage with fewer (such as one
        # without experts) would not call the last all-reduces, and the others would hang. Here it adds zeros in them.
        for _ in range(self.most_groups - len(self.bit16_groups)):
            if self.cpu_offload:
                found.append(self.complete_grad_norm_calculation_for_cpu_offload([]))
            else:
                found.append(self.get_grad_norm_direct([], []))
        norm: Tensor = found[0] if len(found) == 1 else combine_grad_norm_groups(found, norm_type=norm_type)
        return norm

    def unscale_and_clip_grads(self, grad_groups_flat: Sequence[Tensor | Sequence[Tensor]], total_norm: Tensor) -> None:
        """Clip the gradients of one parameter group, and divide them by the loss scale."""
        parts = [part for each in grad_groups_flat for part in ([each] if isinstance(each, Tensor) else each)]
        clip([part.data for part in parts], total_norm, self.clip_grad, self.loss_scale)


class Stage3Optimizer(DeepSpeedZeroOptimizer_Stage3):
    """The optimizer of ZeRO-3."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # DeepSpeed has buckets for its own reduction dtypes only: gradients of kept parameters need one of float32.
        kept = [p for group in self.fp16_groups for p in group if is_kept(p)]
        if kept and torch.float32 not in self.ipg_buckets:
            bucket = stage3.IPGBucketZ3()
            if self.contiguous_gradients:
                size = min(self.reduce_bucket_size, sum(p.ds_numel for p in kept))
                bucket.buffer = torch.empty(size, dtype=torch.float32, device=self.device)
            self.ipg_buckets[torch.float32] = bucket

    def get_param_comm_dtype(self, param: nn.Parameter) -> torch.dtype:
        """Return a gradient's reduction dtype: float32 for kept parameters; DeepSpeed has one dtype for all."""
        dtype: torch.dtype = torch.float32 if is_kept(param) else super().get_param_comm_dtype(param)
        return dtype

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Tensor) -> None:
        """Clip the gradients of a sub-group, and divide them by the loss scale."""
        clip([self.fp32_partitioned_groups_flat[sub_group_id].grad], total_norm, self.clip_grad, self.loss_scale)


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that are adjacent in one storage as one flat view of it; None if they are not."""
    first = tensors[0]
    end = start = first.storage_offset()
    for tensor in tensors:
        here = tensor.untyped_storage()._cdata == first.untyped_storage()._cdata and tensor.storage_offset() == end
        if not here or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return None
        end += tensor.numel()
    return first.as_strided((end - start,), (1,))
