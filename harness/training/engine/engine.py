"""One narrow interface over DeepSpeed's engines: a step, an evaluation, and what a step leaves to be read.

`PipelineStages` runs ZeRO-0 and ZeRO-1 with any number of stages through PipelineEngine; `WholeModel` runs ZeRO-2
and ZeRO-3, where every rank passes through all layers. Both take the same micro-batches and return the same numbers.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from harness.data.batches.collate import MicroBatch
from harness.data.batches.evaluation import EvaluationBatch
from harness.data.batches.same_data import require_same_data
from harness.deepspeed.engine import (
    count_skipped_step,
    evaluate_pipeline,
    scales_loss_dynamically,
    skips_nonfinite_itself,
)
from harness.deepspeed.zero3_parameters import GatheredParameters
from harness.errors import UserError
from harness.parallel.draws import DrawKeys
from harness.parallel.generators import own_generators, seed_of
from harness.parallel.gradients.compressed import CompressedReduction
from harness.parallel.host import numbers, to_device
from harness.parallel.values import Value
from harness.resilience.process.activity import beat, begin_step
from harness.topology.groups import Groups
from harness.training.engine.losses import GuardedLoss, Outputs, RouterLoss, Targets, losses_by_source, targets
from harness.training.engine.optimizer import SchedulePosition

Batch: TypeAlias = tuple[Value, Targets]


@dataclass(frozen=True)
class StepOutcome:
    """What came out of a step, the same on all ranks.

    Attributes:
        loss: mean over all that counts in the global batch.
        grad_norm: global norm before clipping; None where it is not finite.
        finite_gradient: whether the gradient is finite.
        applied: whether the weights were updated.
        parts: what the loss reports besides, by name, each the mean over the micro-batches.
    """

    loss: float
    grad_norm: float | None
    finite_gradient: bool
    applied: bool
    parts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one rank has seen of a step.

    Attributes:
        outputs, loss, gradients: whether the activations that its stage sent on, its losses, and the gradients that
            it received for those activations were finite.
    """

    rank: int
    stage: int
    loss: bool
    outputs: bool = True
    gradients: bool = True


class Engine(ABC):
    """A DeepSpeed engine with the loss and the groups that it runs with.

    Attributes:
        deepspeed: the engine itself.
        device: where the batches go.
        dtype: of the parameters, to which floating inputs are cast.
        seed: of what is drawn outside of the layers, as in a loss.
        schedule: brings the learning rate to any step.
        compared: whether the ranks are known to read the same data.
        keys: what random numbers in the layers depend on; None where they draw none.
        compression: averages the gradients; None where DeepSpeed does.
    """

    compression: CompressedReduction | None = None

    def __init__(
        self,
        deepspeed: DeepSpeedEngine,
        groups: Groups,
        loss: GuardedLoss,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        keys: DrawKeys | None = None,
    ) -> None:
        self.deepspeed = deepspeed
        self.groups = groups
        self.loss = loss
        self.device = device
        self.dtype = dtype
        self.seed = seed
        self.keys = keys
        self.schedule = SchedulePosition(deepspeed)
        self._length: int | None = None  # of the samples of the last step
        self.compared = False

    @property
    def reads_data(self) -> bool:
        """Whether this rank needs inputs or labels at all."""
        return self.groups.is_first_stage or self.groups.is_last_stage

    @property
    def has_router_loss(self) -> bool:
        """Whether the loss counts padding too."""
        return isinstance(self.loss.loss, RouterLoss)

    @property
    def needs_one_length(self) -> bool:
        """Whether all samples of a step are padded to one length; see `batches/padding.py`."""
        return self.groups.layout.pp_size > 1 or self.keys is not None or self.has_router_loss

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        return float(self.deepspeed.get_lr()[0])

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        consumed_samples: int,
        length: int | None = None,
        sources: Sequence[Sequence[int]] = (),
    ) -> StepOutcome:
        """Forward, backward and update over one global batch; all ranks call it.

        Args:
            micro_batches: (inputs, labels) of this data-parallel rank, [micro-batch, sequence] each for a decoder;
                empty where no data is read.
            consumed_samples: by all ranks in the steps before.
            length: tokens that all samples of the step are padded to; None if it does not change.
            sources: of each sample of each micro-batch, the number of its source; none if they are not told apart.

        Raises:
            UserError: on all ranks if, in the first step, ranks that must read the same data do not.
        """
        begin_step()
        self._expect_length(length)
        if not self.compared:
            require_same_data(micro_batches, self.groups)
            self.compared = True
        if self.keys is not None:
            self.keys.begin_step(consumed_samples)
        self._forget()

        # 1. weights of the micro-batches: DeepSpeed takes the mean over micro-batches and data ranks, which is not the
        #    mean over labels where micro-batches have different numbers of them. So these are counted in the whole
        #    global batch before the first forward pass.
        whole = [EvaluationBatch(inputs=x, labels=y, rows=len(_first(y))) for x, y in micro_batches]
        batches = self.weigh(whole, self.count(whole), sources=sources)

        # 2. forward, backward, reduction of gradients, clipping, update. What is drawn is a function of the step alone,
        #    so that a checkpoint need not hold the state of any generator.
        with own_generators(seed_of(self.seed, consumed_samples, self.groups.coordinate.reader), self.device):
            loss, parts = self._forward_backward_update(batches)

        # 3. what came of it, in one copy to the host: the one time in a step that it waits for the device
        found = self.deepspeed.get_global_grad_norm()
        norm, whole_loss, *of_parts = numbers([0.0 if found is None else found, loss, *parts.values()])
        finite = isfinite(norm)
        applied = self.deepspeed.was_step_applied()
        if applied and not finite and skips_nonfinite_itself(self.deepspeed):
            count_skipped_step(self.deepspeed)
            self.schedule.go_to(self.deepspeed.global_steps - self.deepspeed.skipped_steps)
            applied = False
        return StepOutcome(
            loss=whole_loss,
            grad_norm=norm if found is not None and finite else None,
            finite_gradient=applied if found is None else finite,
            applied=applied,
            parts=dict(zip(parts, of_parts, strict=True)),
        )

    def source_losses(self, outcome: StepOutcome) -> dict[str, float]:
        """Return the mean loss of each source of the data, by its name, in a step; none where it is not told apart."""
        sources = losses_by_source(self.loss.loss)
        return {} if sources is None else sources.means(outcome.parts)

    @abstractmethod
    def _forward_backward_update(self, batches: list[Batch]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """One step; the mean over micro-batches and data-parallel ranks of the loss, and of its reported parts."""

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled dynamically (fp16), so that gradients may overflow now and then."""
        return scales_loss_dynamically(self.deepspeed.optimizer)

    def evidence(self) -> Evidence:
        """Return what this rank has seen of the last step that was not finite. Waits for the device."""
        return Evidence(rank=self.groups.rank, stage=self.groups.coordinate.stage, loss=self.loss.finite)

    def _forget(self) -> None:
        """Begin a step of which nothing is known."""
        self.loss.reset()

    def _expect_length(self, length: int | None) -> None:
        """Prepare for a step whose samples have this length."""
        self._length = length

    def evaluate(self, micro_batches: Sequence[EvaluationBatch], steps: int) -> tuple[float, float]:
        """Sum of the losses, and number of what counts, in `steps` micro-batches a data rank; equal on all ranks.

        `micro_batches` holds them where data is read, and is empty elsewhere.
        """
        counted, rows = self.count(micro_batches)
        with torch.no_grad():
            mean = self._evaluate(self.weigh(micro_batches, (counted, rows), by_label=True), steps)
        if self.groups.pp_group is not None:
            source = dist.get_process_group_ranks(self.groups.pp_group)[self.groups.loss_stage]
            dist.broadcast(counted, src=source, group=self.groups.pp_group)
        mean_loss, n = numbers([mean, counted])
        return mean_loss * n, n

    def count(self, micro_batches: Sequence[EvaluationBatch]) -> tuple[Tensor, Tensor]:
        """Return what counts for the loss, and how many samples do, in the micro-batches of all data ranks; known on
        the last stage, which has the labels."""
        own = [0, 0]
        if self.groups.is_last_stage:
            own = [
                sum(self.loss.count(batch.labels, batch.rows) for batch in micro_batches),
                sum(batch.rows for batch in micro_batches),
            ]
        both: Tensor = to_device(torch.tensor(own, dtype=torch.float64), self.device)
        if self.groups.is_last_stage and self.groups.dp_group is not None:
            dist.all_reduce(both, group=self.groups.dp_group)
            both /= self.groups.layout.cp_size  # whose ranks have counted the same samples
        return both[0], both[1]

    def weigh(
        self,
        micro_batches: Sequence[EvaluationBatch],
        totals: tuple[Tensor, Tensor],
        by_label: bool = False,
        sources: Sequence[Sequence[int]] = (),
    ) -> list[Batch]:
        """Copy each micro-batch to the device, with the weight by which the engine's mean becomes that over all that
        counts. The weights are made there: the host does not wait for `totals`.

        `by_label`: its share is that of its labels, not of its samples. Then it is the same in any part of a data set.
        """
        layout = self.groups.layout
        n = len(micro_batches) * layout.dp_size
        weight, per_row = (n / total.clamp(min=1.0) for total in totals)
        weighed = []
        for batch, of_rows in zip(micro_batches, sources or [()] * len(micro_batches), strict=True):
            share = weight * self.loss.count(batch.labels, batch.rows) if by_label else per_row * batch.rows
            share = share / layout.cp_size  # whose ranks each count their part of it
            wanted = targets(batch.labels, weight, batch.rows, share, of_rows)
            weighed.append((to_device(self._cast(batch.inputs), self.device), to_device(wanted, self.device)))
        return weighed

    def _cast(self, inputs: Any) -> Any:
        if isinstance(inputs, Tensor):
            return inputs.to(self.dtype) if inputs.is_floating_point() else inputs
        return tuple(map(self._cast, inputs))

    def release(self) -> None:
        """Let go of the engine's memory; its process groups stay."""
        self.deepspeed.destroy()
        for held in (*self.deepspeed.module.parameters(), self.deepspeed):
            vars(held).clear()  # hooks of parameters refer to it, which Python cannot tell from a use
        gc.collect()

    @abstractmethod
    def _evaluate(self, batches: list[Batch], steps: int) -> Tensor:
        """Return the same mean of the loss, forward only."""


class PipelineStages(Engine):
    """Layers cut into stages (one is enough), driven by PipelineEngine's schedule."""

    deepspeed: PipelineEngine
    _shape: tuple[int, ...] | None = None

    def _expect_length(self, length: int | None) -> None:
        """Let the stages exchange the shape of their activations anew; each of them knows the length."""
        if length != self._length and self.groups.layout.pp_size > 1:
            self.deepspeed.reset_activation_shape()
            self._shape = None
        super()._expect_length(length)

    def evidence(self) -> Evidence:
        """Return what this rank has seen of the last step that was not finite, in its stage too. Waits for the
        device."""
        finite = self.deepspeed.module.finite
        return replace(super().evidence(), outputs=finite.outputs, gradients=finite.gradients)

    def _forget(self) -> None:
        super()._forget()
        self.deepspeed.module.finite.reset()

    def _forward_backward_update(self, batches: list[Batch]) -> tuple[Tensor, Mapping[str, Tensor]]:
        self._require_one_shape(batches)
        with flops_profile(self.deepspeed):
            # One call for the whole step: DeepSpeed executes this stage's list of instructions (forward, backward, send
            # and receive of each micro-batch in the order of `pipeline.schedule`, then ReduceTiedGrads, ReduceGrads,
            # OptimizerStep, which clips). `patches.py` lists what is changed of it. The loss is that of all stages.
            loss = self.deepspeed.train_batch(iter(batches))
        return loss, self.deepspeed.get_additional_losses() or {}

    def _require_one_shape(self, batches: list[Batch]) -> None:
        """Refuse micro-batches of unequal shapes: stages exchange the shape once, and another one would hang them."""
        if self.groups.layout.pp_size == 1:
            return
        for inputs, _ in batches:
            shape = tuple(_first(inputs).shape)
            self._shape = self._shape or shape
            if shape != self._shape:
                raise UserError(
                    f"micro-batches of {self._shape} and {shape}: with pipeline stages all must have one shape; "
                    "pad them, or join and cut the samples to one length"
                )

    def _evaluate(self, batches: list[Batch], steps: int) -> Tensor:
        trained, self._shape = self._shape, None  # evaluation may have another micro-batch size or block size
        self._require_one_shape(batches)
        loss = evaluate_pipeline(self.deepspeed, batches, steps)
        self._shape = trained
        return loss


class WholeModel(Engine):
    """All layers on every rank, for ZeRO-2 and ZeRO-3."""

    @cached_property
    def gathered(self) -> GatheredParameters:
        """What ZeRO-3 has gathered."""
        return GatheredParameters(self.deepspeed)

    def _forward_backward_update(self, batches: list[Batch]) -> tuple[Tensor, Mapping[str, Tensor]]:
        total = torch.zeros((), device=self.device)
        parts: dict[str, Tensor] = {}
        for index, (inputs, wanted) in enumerate(batches):
            # parameters that ZeRO-3 has gathered stay for the next micro-batch, but for the step's last
            with self.gathered.staying(index + 1 < len(batches)):
                outputs, loss = self._passed(inputs, wanted)
                for name, value in self.loss.reported.items():
                    if value is not None:
                        parts[name] = parts.get(name, 0.0) + value
                del outputs  # the logits are not needed while the next ones are made
                self.deepspeed.backward(loss)  # its hooks reduce gradients over the data ranks bucket by bucket
                beat("optimizer step")
                self.deepspeed.step()  # counts micro-batches: only the last one clips and updates
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
        """Return the outputs of a micro-batch, and its loss."""
        self.loss.expect(wanted)
        outputs = self.deepspeed(inputs)
        self.loss.expect(None)
        beat("loss")
        return outputs, self.loss(outputs, wanted)

    def _mean(self, value: Tensor) -> Tensor:
        if self.groups.dp_group is not None:
            dist.all_reduce(value, group=self.groups.dp_group)
        return value / self.groups.layout.dp_size


def _first(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


@contextmanager
def flops_profile(engine: DeepSpeedEngine) -> Iterator[None]:
    """Print the section `flops_profiler`'s report of a pipeline's step, which PipelineEngine starts and never ends.

    It speaks of rank 0: its stage, and its last micro-batch.
    """
    step = engine.global_steps
    yield
    if engine.flops_profiler_enabled() and step == engine.flops_profiler_profile_step() and engine.global_rank == 0:
        engine.flops_profiler.print_model_profile(
            profile_step=step,
            module_depth=engine.flops_profiler_module_depth(),
            top_modules=engine.flops_profiler_top_modules(),
            detailed=engine.flops_profiler_detailed(),
            output_file=engine.flops_profiler_output_file(),
        )
        engine.flops_profiler.end_profile()
