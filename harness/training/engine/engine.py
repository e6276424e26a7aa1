"""One narrow interface over DeepSpeed's engines: a training step, an evaluation, and the outcome of a step.

`PipelineStages` runs ZeRO-0 and ZeRO-1 with any number of stages (also one) on PipelineEngine. `WholeModel` runs ZeRO-2
and ZeRO-3, with all layers on every rank. Both take the same micro-batches and return the same numbers.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import TypeAlias

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from harness.batches.collate import MicroBatch, unequal_shapes
from harness.batches.evaluation import EvaluationBatch
from harness.batches.same_data import require_same_data
from harness.deepspeed.engine import count_skipped_step, evaluate_pipeline
from harness.deepspeed.update import Compression, StagedEngine
from harness.deepspeed.zero3_parameters import GatheredParameters
from harness.hf.layers.attention import AttentionKernels
from harness.parallel.dropout import RngKeys
from harness.parallel.generators import own_generators, seed_of
from harness.parallel.host import numbers, to_device
from harness.parallel.values import Value
from harness.resilience.process.activity import beat, count_step
from harness.topology.groups import Groups
from harness.training.engine.losses import (
    GuardedLoss,
    Outputs,
    RouterLoss,
    Targets,
    first_tensor,
    losses_by_source,
    targets,
)
from harness.training.engine.optimizer import GivenSchedule, SchedulePosition
from harness.training.engine.spec import EngineSpec

Batch: TypeAlias = tuple[Value, Targets]


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, the same on all ranks.

    Attributes:
        loss: mean over the valid labels (or samples) of the global batch.
        grad_norm: global norm before clipping; None if it is not finite.
        finite_gradient: whether the gradient is finite.
        applied: whether the weights were updated.
        parts: other numbers that the loss reports, by name, each the mean over the micro-batches.
    """

    loss: float
    grad_norm: float | None
    finite_gradient: bool
    applied: bool
    parts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class EvaluationTotals:
    """Sums over evaluated micro-batches, the same on all ranks.

    Attributes:
        loss: sum of the losses.
        counted: number of valid labels (or samples).
        parts: sums of the other numbers that the loss reports, by name.
    """

    loss: float = 0.0
    counted: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: EvaluationTotals) -> EvaluationTotals:
        names = dict.fromkeys((*self.parts, *other.parts))
        return EvaluationTotals(
            loss=self.loss + other.loss,
            counted=self.counted + other.counted,
            parts={name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names},
        )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Which values of a step were finite on one rank.

    Attributes:
        loss: whether the rank's losses were finite.
        outputs: whether the activations that its stage sent were finite.
        gradients: whether the gradients that its stage received for these activations were finite.
    """

    rank: int
    stage: int
    loss: bool
    outputs: bool = True
    gradients: bool = True


class Engine(ABC):
    """A DeepSpeed engine with its loss and process groups.

    Attributes:
        deepspeed: DeepSpeed's engine itself.
        spec: arguments and config of the run; its seed also seeds random numbers drawn outside the layers, for example
            in a user's loss.
        groups, device, dtype: the process groups and the device of this rank, and the dtype of its parameters. Batches
            are copied to the device, and floating-point inputs cast to the dtype.
        reads_labels: whether this rank needs labels: only the last stage does.
        reads_data: whether this rank needs inputs or labels: only the first and the last stage do.
        sources: collects losses by data source; None if they are not reported by source.
        schedule: sets the learning rate for any step.
        compared: whether the first step has compared the ranks' data.
        keys: RNG keys for dropout in the layers; None if the layers have no dropout.
        compression: the compressed reduction of gradients; None if DeepSpeed reduces them.
    """

    def __init__(
        self,
        deepspeed: DeepSpeedEngine,
        spec: EngineSpec,
        groups: Groups,
        loss: GuardedLoss,
        keys: RngKeys | None = None,
        compression: Compression | None = None,
    ) -> None:
        self.deepspeed: DeepSpeedEngine = deepspeed
        self.spec = spec
        self.groups = groups
        self.device = groups.device
        self.dtype = spec.dtype
        self.reads_labels = self.groups.is_last_stage
        self.reads_data = self.groups.is_first_stage or self.reads_labels
        self.loss = loss
        self.sources = losses_by_source(loss.loss)
        self.keys = keys
        self.compression = compression
        self.schedule = SchedulePosition(deepspeed)
        self.compared = False
        on_gpu = groups.device.type == "cuda"
        self._attention = AttentionKernels(spec.args.sdpa_backend, groups.device) if on_gpu else None

    @property
    def has_router_loss(self) -> bool:
        """Whether the loss includes a router loss, which depends on padding."""
        return isinstance(self.loss.loss, RouterLoss)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        scheduler = self.deepspeed.lr_scheduler
        # This rank may hold nothing of the user's first group, whose rate is reported on all ranks.
        if isinstance(scheduler, GivenSchedule):
            return scheduler.first_learning_rate
        return float(self.deepspeed.get_lr()[0])

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        consumed_samples: int,
        length: int | None = None,
        sources: Sequence[Sequence[int]] = (),
        *,
        settles: bool = True,
    ) -> StepOutcome:
        """Run forward, backward and update over one global batch; all ranks call it.

        Args:
            micro_batches: (inputs, labels) of this data-parallel rank, each [micro-batch, sequence] for a decoder;
                empty on ranks that read no data.
            consumed_samples: number of samples that all ranks together consumed in earlier steps.
            length: number of tokens to which all samples of the step are padded; None if it never changes.
            sources: source of each sample [micro-batches][samples]; empty if losses are not reported by source.
            settles: whether to wait until every rank has the new weights; otherwise the next step or `settle` waits.

        Raises:
            UserError: on all ranks, in the first step, if ranks that must read the same data do not.
        """
        count_step()
        self.loss.reset()
        if not self.compared:
            # In the first step only: it hashes the batches, and all ranks wait for each other's digests.
            require_same_data(micro_batches, self.groups)
            self.compared = True
        if self.keys is not None:
            self.keys.begin_step(consumed_samples)

        # 1. Weights of the micro-batches. DeepSpeed averages over micro-batches and data ranks. If micro-batches have
        #    different numbers of labels, that is not the mean over labels. So count the labels of the global batch
        #    before the first forward pass, and weight each micro-batch's sum by it.
        whole = []
        for inputs, labels in micro_batches:
            # All rows count: only evaluations fill up their last micro-batches.
            whole.append(EvaluationBatch(inputs=inputs, labels=labels, rows=len(first_tensor(labels))))
        batches = self.weigh(whole, self.count(whole), sources=sources)

        # 2. Forward, backward, gradient reduction, clipping, update. The seed depends on the step and the data rank
        #    alone, so a checkpoint needs no RNG state, and ranks that share samples draw the same numbers.
        seed = seed_of(self.spec.args.seed, consumed_samples, self.groups.coordinate.batch_rank)
        with own_generators(seed, self.device), self._attending(whole, length):
            loss, parts = self._forward_backward_update(batches, length)

        if settles:
            self.settle()

        # 3. The outcome, in one copy to the host: the only place of a step where the host waits for the device.
        found = self.deepspeed.get_global_grad_norm()
        # Copied to the host before the update was queued, so reading it does not wait for the update.
        early = self.deepspeed.outcome
        norm, whole_loss, *of_parts = (
            numbers([0.0 if found is None else found, loss, *parts.values()]) if early is None else early()
        )
        finite = isfinite(norm)
        applied = self.deepspeed.was_step_applied()
        # If a fused torch optimizer has skipped the update on the device, DeepSpeed does not know it: correct its
        # counter, and undo the schedule's step.
        if applied and not finite and self.deepspeed.skips_on_device:
            count_skipped_step(self.deepspeed)
            self.schedule.go_to(self.deepspeed.global_steps - self.deepspeed.skipped_steps)
            applied = False
        return StepOutcome(
            loss=whole_loss,
            grad_norm=norm if found is not None and finite else None,
            # Without a norm (under torch's loss scaler, or with compute_grad_norm off) DeepSpeed's own check decides.
            finite_gradient=applied if found is None else finite,
            applied=applied,
            parts=dict(zip(parts, of_parts, strict=True)),
        )

    def _attending(
        self, micro_batches: Sequence[EvaluationBatch], length: int | None = None
    ) -> AbstractContextManager[None]:
        """Return the context for passes over these micro-batches, all padded to `length` if it is given."""
        if self._attention is None:
            return nullcontext()
        shapes = [first_tensor(batch.inputs).shape for batch in micro_batches]
        return self._attention.ordered(shapes if length is None else [length])

    @abstractmethod
    def settle(self) -> None:
        """Wait for the new weights from other ranks, before anything reads weights; all ranks call it."""

    @abstractmethod
    def _forward_backward_update(self, batches: list[Batch], length: int | None) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Run one step; return the loss and its reported parts, each the mean over micro-batches and data ranks.

        `length` is the number of tokens to which all samples are padded; None if it never changes.
        """

    def evidence(self) -> Evidence:
        """Return which values of the last step were finite on this rank. Waits for the device."""
        return Evidence(rank=self.groups.rank, stage=self.groups.coordinate.stage, loss=self.loss.finite)

    def evaluate(self, micro_batches: Sequence[EvaluationBatch], steps: int) -> EvaluationTotals:
        """Evaluate `steps` micro-batches on each data rank; all ranks call it.

        Args:
            micro_batches: of this data rank; empty on ranks that read no data.
        """
        counted, rows = self.count(micro_batches)
        self.loss.totals = {}
        # Without gradients also because losses recognise an evaluation by that (`MeanLoss`, `GuardedLoss`).
        with torch.no_grad(), self._attending(micro_batches):
            mean = self._evaluate(self.weigh(micro_batches, (counted, rows), by_label=True), steps)
        # The sums of the loss's reported numbers [numbers]: valid only on the stage with the loss, like the count.
        found = [self.loss.totals.get(name, torch.zeros((), device=self.device)) for name in self.loss.reported]
        of_parts = torch.stack(found).double() if found else torch.zeros(0, dtype=torch.float64, device=self.device)
        if found and self.reads_labels and self.groups.dp_group is not None:
            dist.all_reduce(of_parts, group=self.groups.dp_group)
        # Only the stage with the loss has counted labels: on the others the count is 0, and with it the loss.
        if self.groups.pp_group is not None:
            source = dist.get_process_group_ranks(self.groups.pp_group)[self.groups.loss_stage]
            dist.broadcast(counted, src=source, group=self.groups.pp_group)
            if len(of_parts):
                dist.broadcast(of_parts, src=source, group=self.groups.pp_group)
        mean_loss, n, *sums = numbers([mean, counted, *of_parts])
        return EvaluationTotals(loss=mean_loss * n, counted=n, parts=dict(zip(self.loss.reported, sums, strict=True)))

    def count(self, micro_batches: Sequence[EvaluationBatch]) -> tuple[Tensor, Tensor]:
        """Return the number of target tokens (or samples) in the loss, and of samples, over all data ranks.

        Two float64 scalars on the device, valid only on the stage that has the labels.
        """
        counted = rows = 0
        if self.reads_labels:
            for batch in micro_batches:
                counted += self.loss.count(batch.labels, batch.rows)
                rows += batch.rows
        # float64, because float32 cannot represent every count above 2**24.
        both: Tensor = to_device(torch.tensor([counted, rows], dtype=torch.float64), self.device)
        if self.reads_labels and self.groups.dp_group is not None:
            dist.all_reduce(both, group=self.groups.dp_group)
            # Context ranks have all counted the same samples.
            both /= self.groups.layout.cp_size
        return both[0], both[1]

    def weigh(
        self,
        micro_batches: Sequence[EvaluationBatch],
        totals: tuple[Tensor, Tensor],
        by_label: bool = False,
        sources: Sequence[Sequence[int]] = (),
    ) -> list[Batch]:
        """Copy each micro-batch to the device, with a weight that makes the engine's mean a mean over valid labels.

        Args:
            totals: the result of `count`, two scalars.
            by_label: weight a micro-batch's router loss by its labels, not its samples, so that an evaluation does not
                depend on how the data set is cut into parts.
        """
        layout = self.groups.layout
        # The engine divides the sum over micro-batches and data ranks by n; n / total makes it a mean over labels.
        n = len(micro_batches) * layout.dp_size
        counted, rows = totals
        # On the device: the host does not wait for the totals of all ranks.
        # Clamped, so that a global batch without labels has the loss 0, not NaN.
        weight = n / counted.clamp(min=1.0)
        per_row = n / rows.clamp(min=1.0)
        weighed = []
        for batch, of_rows in zip(micro_batches, sources or [()] * len(micro_batches), strict=True):
            router_weight = weight * self.loss.count(batch.labels, batch.rows) if by_label else per_row * batch.rows
            # Each context rank adds the router loss of the same micro-batch.
            router_weight = router_weight / layout.cp_size
            inputs = to_device(batch.inputs, self.device, self.dtype)
            wanted = targets(batch.labels, weight, batch.rows, router_weight, of_rows)
            weighed.append((inputs, to_device(wanted, self.device)))
        return weighed

    def release(self) -> None:
        """Free the engine's memory, but keep its process groups. A rank may call it alone."""
        self.deepspeed.destroy()
        # Hooks in C++ refer to the engine, in a cycle that Python's gc cannot see: without this, its memory stays.
        for held in (*self.deepspeed.module.parameters(), self.deepspeed):
            vars(held).clear()
        gc.collect()

    @abstractmethod
    def _evaluate(self, batches: list[Batch], steps: int) -> Tensor:
        """Return the mean loss as a training step does, from forward passes alone."""


class PipelineStages(Engine):
    """Layers in one or more pipeline stages, driven by PipelineEngine's schedule."""

    deepspeed: StagedEngine
    _length: int | None = None  # padded length of the last step's samples
    _shape: tuple[int, ...] | None = None

    def settle(self) -> None:
        """Finish the exchange of new weights between ranks, starting it if necessary; all ranks call it."""
        self.deepspeed.await_weights()

    def release(self) -> None:
        """Free the engine's memory, but keep its process groups. A rank may call it alone."""
        # The peer of a transfer in flight may have exited.
        with suppress(RuntimeError):
            self.deepspeed.abandon_weights()
        super().release()

    def evidence(self) -> Evidence:
        """Return which of the last step's values were finite on this rank and its stage. Waits for the device."""
        finite = self.deepspeed.module.finite
        if finite is None:
            return super().evidence()
        return replace(super().evidence(), outputs=finite.outputs, gradients=finite.gradients)

    def _forward_backward_update(self, batches: list[Batch], length: int | None) -> tuple[Tensor, Mapping[str, Tensor]]:
        if self.deepspeed.module.finite is not None:
            self.deepspeed.module.finite.reset()
        if self.groups.layout.pp_size > 1:
            # Stages send shapes only with the first tensor. All know `length`, so all send them again in the same step.
            if length != self._length:
                self.deepspeed.reset_activation_shape()
                self._length = length
                self._shape = None
            self._require_one_shape(batches)
        # Read before `train_batch` counts the step: the flops profiler numbers steps from 0.
        step = self.deepspeed.global_steps
        # One call for the whole step. The engine executes this stage's instructions: forward, backward, send and
        # receive of each micro-batch in the order of `pipeline.schedule`, then ReduceTiedGrads, ReduceGrads and
        # OptimizerStep, which clips: see `deepspeed/update.py`. The returned loss is equal on all ranks.
        loss = self.deepspeed.train_batch(iter(batches))
        if self.deepspeed.flops_profiler_enabled() and step == self.deepspeed.flops_profiler_profile_step():
            end_flops_profile(self.deepspeed)
        return loss, self.deepspeed.get_additional_losses() or {}

    def _require_one_shape(self, batches: list[Batch]) -> None:
        """Raise UserError for micro-batches of unequal shapes: stages exchange the shape only once and would hang."""
        for inputs, _ in batches:
            shape = tuple(first_tensor(inputs).shape)
            self._shape = self._shape or shape
            if shape != self._shape:
                raise unequal_shapes(self._shape, shape)

    def _evaluate(self, batches: list[Batch], steps: int) -> Tensor:
        # An evaluation may have another micro-batch size or sequence length than training.
        trained = self._shape
        self._shape = None
        if self.groups.layout.pp_size > 1:
            self._require_one_shape(batches)
        loss = evaluate_pipeline(self.deepspeed, batches, steps)
        self._shape = trained
        return loss


class WholeModel(Engine):
    """All layers on every rank, for ZeRO-2 and ZeRO-3."""

    def settle(self) -> None:
        """Do nothing: ZeRO-2's update waits for all weights, and under ZeRO-3 each layer gathers its own."""

    @cached_property
    def gathered(self) -> GatheredParameters:
        """Controls how long ZeRO-3 keeps gathered parameters."""
        return GatheredParameters(self.deepspeed)

    def _forward_backward_update(
        self, batches: list[Batch], _length: int | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        total = torch.zeros((), device=self.device)
        parts: dict[str, Tensor] = {}
        for index, (inputs, wanted) in enumerate(batches):
            # Keep ZeRO-3's gathered parameters for the next micro-batch, but not past the update, which changes them.
            with self.gathered.staying(index + 1 < len(batches)):
                outputs, loss = self._passed(inputs, wanted)
                for name, value in self.loss.reported.items():
                    if value is not None:
                        parts[name] = parts.get(name, 0.0) + value
                # Frees the logits before the next ones are computed.
                del outputs
                # DeepSpeed divides the loss by the number of micro-batches. Hooks reduce the gradients over the
                # data-parallel ranks, bucket by bucket.
                self.deepspeed.backward(loss)
                beat("optimizer step")
                # DeepSpeed counts the micro-batches: only the last call of a step clips and updates.
                self.deepspeed.step()
                total += loss.detach()
        means = {name: self._mean(value / len(batches)) for name, value in parts.items()}
        return self._mean(total / len(batches)), means

    def _evaluate(self, batches: list[Batch], steps: int) -> Tensor:
        self.deepspeed.eval()
        total = torch.zeros((), device=self.device)
        for inputs, wanted in batches:
            total += self._passed(inputs, wanted)[1]
        self.deepspeed.train()
        return self._mean(total / steps)

    def _passed(self, inputs: Value, wanted: Targets) -> tuple[Outputs, Tensor]:
        self.loss.expect(wanted)
        outputs = self.deepspeed(inputs)
        self.loss.expect(None)
        beat("loss")
        return outputs, self.loss(outputs, wanted)

    def _mean(self, value: Tensor) -> Tensor:
        if self.groups.dp_group is not None:
            dist.all_reduce(value, group=self.groups.dp_group)
        return value / self.groups.layout.dp_size


def end_flops_profile(engine: DeepSpeedEngine) -> None:
    """Print the flops profiler's report on the previous step: PipelineEngine starts the profiler but never ends it.

    The report covers the last micro-batch on rank 0's stage.
    """
    if engine.global_rank == 0:
        engine.flops_profiler.print_model_profile(
            profile_step=engine.flops_profiler_profile_step(),
            module_depth=engine.flops_profiler_module_depth(),
            top_modules=engine.flops_profiler_top_modules(),
            detailed=engine.flops_profiler_detailed(),
            output_file=engine.flops_profiler_output_file(),
        )
        engine.flops_profiler.end_profile()
