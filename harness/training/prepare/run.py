"""The state of one run on this rank.

`RunInputs` holds the Trainer's arguments, `RunSpec` what they mean: model, data, config and layout. Both are frozen.
`Run` is the live run of a spec, with an engine. The type of a function's argument shows which of them it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import nn

from harness.arguments.themes.intervals import interval
from harness.batches.evaluation import EvaluationData
from harness.batches.stream import BatchStream, dataset_length
from harness.checkpoint.training_state import EngineState
from harness.console import Console
from harness.hf.adapters import saved_name
from harness.training.callbacks import TrainerState
from harness.training.engine.context import EngineContext
from harness.training.engine.engine import Engine
from harness.training.parts import RunPrediction
from harness.training.parts.data import SamplePrompts
from harness.training.prepare.dataset_check import DatasetCheck
from harness.training.prepare.plan import RunSpec
from harness.training.prepare.stages import StageLine
from harness.training.prepare.trainable import TrainableModel


@dataclass(frozen=True, kw_only=True)
class StepEvents:
    """The events that the arguments ask for after a step, which may span the end of an epoch."""

    epoch_events: tuple[str, ...]
    log: bool
    evaluate: bool
    save: bool


NOTHING_DUE = StepEvents(epoch_events=(), log=False, evaluate=False, save=False)


@dataclass(kw_only=True)
class Run:
    """A run that is ready for its first step, or for loading its checkpoint.

    Rebalancing (`--rebalance_steps`), a resume and new evaluation data replace fields: do not keep copies of these.

    Attributes:
        spec: what is run, as all ranks have agreed.
        context: this rank's groups and device, and from what its engine is built.
        data_check: checks the first samples of a data set.
        trainable: the model as pipeline layers, with its loss.
        base_checksums: of the adapters' base model by name, on rank 0; empty elsewhere and without adapters.
        boundaries: index of the first pipeline layer of each stage, then the number of layers.
        stage_lines: one line a stage, as reported to the user.
        foreign_groups: process groups that were open before the run.
        one_host: whether all ranks are on one host.
        prompts: texts that the model continues at each evaluation; None without any.
        prediction: of memory and speed; None without the planner, or if it cannot read the model.
        run_id: identifies the run; a resumed run keeps the id of its checkpoint.
        state: counters, best evaluation and log history, as callbacks get it.
        stream: the training samples of this rank; None without training data.
        evaluation_is_new: whether the evaluation data were set after the run began, and is not checked yet.
        evaluation_due: whether the last step must still be evaluated, as a signal or an error came before.
    """

    spec: RunSpec
    context: EngineContext
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
    state: TrainerState = field(init=False)
    stream: BatchStream | None = field(init=False, default=None)
    evaluation_is_new: bool = field(init=False, default=False)
    evaluation_due: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.state = self._initial_state()

    @property
    def console(self) -> Console:
        """Where the run prints."""
        return self.spec.console

    @property
    def module(self) -> nn.Module:
        """This rank's layers, as DeepSpeed holds them, with the weights of the last update."""
        module: nn.Module = self.engine.deepspeed.module
        self.engine.settle()
        return module

    @property
    def engine_state(self) -> EngineState:
        """The part of the engine that a checkpoint stores, and the names in it."""
        self.engine.settle()
        adapters, name = self.spec.adaptation is not None, self.trainable.stored_name
        return EngineState(
            engine=self.engine.deepspeed,
            groups=self.context.groups,
            rename=(lambda key: saved_name(name(key))) if adapters else name,
            adapters=adapters,
            compression=self.engine.compression,
            one_host=self.one_host,
        )

    def set_evaluation(self, data: EvaluationData, *, is_new: bool) -> None:
        """Replace the evaluation data; `is_new`: they are not checked yet."""
        self.spec = replace(self.spec, data=replace(self.spec.data, evaluation=data))
        self.evaluation_is_new = is_new

    def _initial_state(self) -> TrainerState:
        """Return the state before the first step."""
        samples = 0 if self.spec.data.train is None else dataset_length(self.spec.data.train)
        return TrainerState(
            max_steps=self.spec.max_steps,
            is_world_process_zero=self.spec.inputs.env.rank == 0,
            is_local_process_zero=self.spec.inputs.env.local_rank == 0,
            num_train_epochs=-(-self.spec.max_steps * self.spec.resolved.train_batch // samples) if samples else 0,
            logging_steps=interval(self.spec.args.logging_steps, self.spec.max_steps),
            eval_steps=interval(self.spec.args.eval_steps or self.spec.args.logging_steps, self.spec.max_steps),
            save_steps=interval(self.spec.args.save_steps, self.spec.max_steps),
            train_batch_size=self.spec.resolved.micro_batch,
        )

    def next_event(self, step: int) -> int:
        """Return the next step after `step` after which something may be due, if no epoch ends and it is not the last.

        So most steps need not ask for `events_after`.
        """
        args = self.spec.args
        stated = [
            args.logging_steps if args.logging_strategy == "steps" else 0,
            (args.eval_steps or args.logging_steps) if args.evaluation_strategy == "steps" else 0,
            args.save_steps if args.save_strategy == "steps" else 0,
        ]
        every = [interval(steps, self.spec.max_steps) for steps in stated]
        return min([(step // steps + 1) * steps for steps in every if steps], default=self.spec.max_steps)

    def events_after(self, step: int, *, epoch_ends: bool, max_steps: int | None = None) -> StepEvents:
        """Return the events due after a step. After the last step, everything that is enabled is due.

        Args:
            epoch_ends: whether the step has used the last sample of a pass through the data.
            max_steps: the number of steps, if a callback has changed it.
        """
        args, last = self.spec.args, step == (max_steps or self.spec.max_steps)

        def asks(strategy: str, stated: float) -> bool:
            steps = interval(stated, self.spec.max_steps)
            return epoch_ends if strategy == "epoch" else strategy == "steps" and steps > 0 and step % steps == 0

        logs = args.logging_strategy != "no" and (last or asks(args.logging_strategy, args.logging_steps))
        logs |= args.logging_first_step and step == 1
        evaluates = self.spec.data.evaluation is not None and args.eval_strategy != "no"
        saves = (last and args.save_strategy != "best") or asks(args.save_strategy, args.save_steps)
        return StepEvents(
            epoch_events=("on_epoch_end", "on_epoch_begin")[: 1 if last else 2] if epoch_ends else (),
            log=logs,
            evaluate=evaluates and (last or asks(args.evaluation_strategy, args.eval_steps or args.logging_steps)),
            save=args.saves and saves,
        )
