"""The live run of a specification on this rank: its process groups, engine, model and counters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist
from torch import nn

from harness.arguments.themes.intervals import interval
from harness.batches.evaluation import EvaluationData
from harness.batches.stream import BatchStream
from harness.checkpoint.training_state import EngineState
from harness.console import Console
from harness.device.memory import EarlierPeaks
from harness.hf.adapters import saved_name
from harness.topology.groups import Groups
from harness.training.callbacks import TrainerState
from harness.training.engine.engine import Engine
from harness.training.parts import RunPrediction
from harness.training.parts.data import Datasets, SamplePrompts
from harness.training.prepare.dataset_check import DatasetCheck
from harness.training.prepare.plan import RunSpec
from harness.training.prepare.stages import StageLine
from harness.training.prepare.trainable import TrainableModel


@dataclass(frozen=True, kw_only=True)
class StepEvents:
    """The events that the arguments request after a step."""

    epoch_events: tuple[str, ...]
    log: bool
    evaluate: bool
    save: bool


NOTHING_DUE = StepEvents(epoch_events=(), log=False, evaluate=False, save=False)


@dataclass(kw_only=True)
class Run:
    """A run that is ready for its first step, or for loading its checkpoint.

    Rebalancing (`--rebalance_steps`), a resume and new evaluation data replace fields: do not keep references to them.

    Attributes:
        spec: the specification that all ranks have settled; it stays as it is.
        data: the data sets in use.
        checkpoint: the checkpoint that the run continues; None if it began at step 0.
        groups: this rank's device and process groups.
        data_check: checks the first samples of a data set.
        trainable: the model as pipeline layers, with its loss.
        base_checksums: checksums of the adapters' base model by name; empty except on rank 0 and without adapters.
        boundaries: index of the first pipeline layer of each stage, followed by the number of layers.
        stage_lines: one line for each stage, as reported to the user.
        foreign_groups: process groups that were open before the run.
        one_host: whether all ranks are on one host.
        prompts: texts that the model continues at each evaluation, or None.
        prediction: predicted memory and speed; None without the planner, or if it cannot read the model.
        run_id: identifies the run; a resumed run keeps the id of its checkpoint.
        earlier_peaks: peaks of memory before the profiler restarted the counters.
        state: counters, best evaluation and log history, as passed to callbacks.
        stream: this rank's training samples; None without training data.
        evaluation_is_new: whether the evaluation data was set after the run began and is not yet checked.
        evaluation_due: whether the last step must still be evaluated, because a signal or an error came first.
    """

    spec: RunSpec
    data: Datasets
    checkpoint: Path | None
    groups: Groups
    data_check: DatasetCheck
    trainable: TrainableModel
    base_checksums: dict[str, str]
    boundaries: list[int]
    engine: Engine
    stage_lines: list[StageLine]
    foreign_groups: frozenset[dist.ProcessGroup]
    one_host: bool
    run_id: str
    prompts: SamplePrompts | None = None
    prediction: RunPrediction | None = None
    earlier_peaks: EarlierPeaks = field(init=False, default_factory=EarlierPeaks)
    state: TrainerState = field(init=False)
    stream: BatchStream | None = field(init=False, default=None)
    evaluation_is_new: bool = field(init=False, default=False)
    evaluation_due: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        samples = self.spec.samples or 0
        self.state = TrainerState(
            max_steps=self.spec.max_steps,
            is_world_process_zero=self.spec.inputs.env.rank == 0,
            is_local_process_zero=self.spec.inputs.env.local_rank == 0,
            num_train_epochs=-(-self.spec.max_steps * self.spec.resolved.train_batch // samples) if samples else 0,
            logging_steps=interval(self.spec.args.logging_steps, self.spec.max_steps),
            eval_steps=interval(self.spec.args.eval_steps or self.spec.args.logging_steps, self.spec.max_steps),
            save_steps=interval(self.spec.args.save_steps, self.spec.max_steps),
            train_batch_size=self.spec.resolved.micro_batch,
        )

    @property
    def console(self) -> Console:
        return self.spec.console

    @property
    def module(self) -> nn.Module:
        """This rank's layers in DeepSpeed's engine, with the weights of the last update."""
        module: nn.Module = self.engine.deepspeed.module
        # Otherwise weights may still be on their way from other data ranks.
        self.engine.settle()
        return module

    @property
    def engine_state(self) -> EngineState:
        """The part of the engine that a checkpoint stores."""
        self.engine.settle()
        adapters, name = self.spec.adaptation is not None, self.trainable.stored_name
        return EngineState(
            engine=self.engine.deepspeed,
            groups=self.groups,
            # Under peft's names, peft's `from_pretrained` can read the adapters of a checkpoint.
            rename=(lambda key: saved_name(name(key))) if adapters else name,
            adapters=adapters,
            compression=self.engine.compression,
            one_host=self.one_host,
        )

    def set_evaluation(self, data: EvaluationData, *, is_new: bool) -> None:
        """Replace the evaluation data; `is_new` marks data that is not yet checked."""
        self.data = replace(self.data, evaluation=data)
        self.evaluation_is_new = is_new

    def next_event(self, step: int) -> int:
        """Return the next step that may have events due, apart from ends of epochs and the last step."""
        # So that most steps can skip `events_after`.
        args = self.spec.args
        stated = [
            args.logging_steps if args.logging_strategy == "steps" else 0,
            (args.eval_steps or args.logging_steps) if args.evaluation_strategy == "steps" else 0,
            args.save_steps if args.save_strategy == "steps" else 0,
        ]
        every = [interval(steps, self.spec.max_steps) for steps in stated]
        return min([(step // steps + 1) * steps for steps in every if steps], default=self.spec.max_steps)

    def events_after(self, step: int, *, epoch_ends: bool, max_steps: int | None = None) -> StepEvents:
        """Return the events due after a step; after the last step, everything enabled is due.

        Args:
            epoch_ends: whether the step has used the last sample of an epoch.
            max_steps: the number of steps, if a callback has changed it.
        """
        args, last = self.spec.args, step == (max_steps or self.spec.max_steps)

        def asks(strategy: str, stated: float) -> bool:
            steps = interval(stated, self.spec.max_steps)
            return epoch_ends if strategy == "epoch" else strategy == "steps" and steps > 0 and step % steps == 0

        logs = args.logging_strategy != "no" and (last or asks(args.logging_strategy, args.logging_steps))
        logs |= args.logging_first_step and step == 1
        evaluates = self.data.evaluation is not None and args.eval_strategy != "no"
        # With --save_strategy best, the last step alone is no reason to save.
        saves = (last and args.save_strategy != "best") or asks(args.save_strategy, args.save_steps)
        return StepEvents(
            # No epoch begins after the last step.
            epoch_events=("on_epoch_end", "on_epoch_begin")[: 1 if last else 2] if epoch_ends else (),
            log=logs,
            evaluate=evaluates and (last or asks(args.evaluation_strategy, args.eval_steps or args.logging_steps)),
            save=args.saves and saves,
        )
