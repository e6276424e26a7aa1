"""Callbacks with the interface of HuggingFace's TrainerCallback.

Callbacks run on every rank. A request through `TrainerControl` on any rank is carried out by all ranks.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias, TypedDict, Unpack

from harness.arguments import TrainingArguments
from harness.atomic import replace_text
from harness.config.values.json_object import JsonObject
from harness.console import Console
from harness.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from harness.training.engine.engine import Engine

# Functions of the Trainer, because rebalancing the stages replaces its engine.
GIVEN: Mapping[str, Callable[[CallingTrainer], object]] = {
    "trainer": lambda trainer: trainer,
    "model": lambda trainer: trainer.model,
    "processing_class": lambda trainer: trainer.processing_class,
    "optimizer": lambda trainer: trainer.engine.deepspeed.optimizer,
    "lr_scheduler": lambda trainer: trainer.engine.deepspeed.lr_scheduler,
}
"""Keyword argument of every callback -> its value, given the Trainer."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, as `metrics.jsonl` holds it.

    Attributes:
        loss: mean over the valid labels of the global batch, including any router loss.
        aux_loss: mean router loss over the micro-batches, before its coefficient; None without a router loss.
        source_losses: mean loss over the valid labels of each data source in this step, by name, without the router
            loss; empty for a single source.
        metrics: other numbers of the loss, by name, such as the rewards of preferences.
        grad_norm: global gradient norm before clipping; None if it is not finite.
        learning_rate: the learning rate of this step.
        tokens_per_second: of all ranks together (samples per second for a model without tokens).
        consumed_samples: samples that the run has consumed, this step included.
        epoch: consumed samples as passes through the data.
        device_memory_gib, host_memory_gib: peak memory so far on the rank that needs most; None without a device.
        skipped: whether the step left all weights unchanged because its loss or gradient was not finite.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    tokens_per_second: float
    step_seconds: float
    consumed_samples: int
    epoch: float
    aux_loss: float | None = None
    source_losses: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    device_memory_gib: float | None = None
    host_memory_gib: float | None = None
    skipped: bool = False

    def as_dict(self) -> JsonObject:
        """Return the record for `metrics.jsonl`, with `metrics` under their own names.

        Optional fields that are empty are left out, and `skipped` unless it is true.
        """
        row = {**vars(self), "source_losses": dict(self.source_losses), **self.metrics}
        del row["metrics"]
        for name in ("aux_loss", "device_memory_gib", "host_memory_gib"):
            if row[name] is None:
                del row[name]
        for name in ("source_losses", "skipped"):
            if not row[name]:
                del row[name]
        return row


NOT_IN_STATE = {
    "total_flos": "6 x parameters x tokens; trainer.get_num_trainableparameters_of() counts the former",
    "num_input_tokens_seen": "state.consumed_samples times the length of a sample",
    "stateful_callbacks": "a callback keeps its state itself",
}


@dataclass
class TrainerState:
    """The state of a run, named as in HuggingFace.

    Attributes:
        best_metric, best_global_step: metric and step of the best evaluation so far.
        best_model_checkpoint, best_saved_metric: the latest complete checkpoint of a best evaluation, and its metric.
        num_train_epochs: passes through the data, including a partial last one; 0 without data or for a stream.
        train_batch_size: samples in a micro-batch.
        consumed_samples: samples that all ranks together have used or skipped.
        skipped_samples: ranges [first, stop) of the sample order that rollbacks have skipped.
        is_hyper_param_search, trial_name, trial_params: constants, because HuggingFace's callbacks read them.
    """

    global_step: int = 0
    max_steps: int = 0
    best_metric: float | None = None
    best_global_step: int = 0
    best_model_checkpoint: str | None = None
    best_saved_metric: float | None = None
    evaluations_without_best: int = 0
    epoch: float = 0.0
    consumed_samples: int = 0
    skipped_samples: list[list[int]] = field(default_factory=list)
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    num_train_epochs: int = 0
    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0
    train_batch_size: int = 0
    log_history: list[JsonObject] = field(default_factory=list)
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: JsonObject | None = None

    # Hidden from type checkers, which would accept any name otherwise.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError; for a field of HuggingFace's state, say what to read instead."""
            if name in NOT_IN_STATE:
                raise AttributeError(f"state.{name} is a field of HuggingFace's TrainerState: {NOT_IN_STATE[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state to a file as JSON."""
        replace_text(Path(json_path), json.dumps(asdict(self), indent=2) + "\n")


@dataclass
class TrainerControl:
    """Requests of callbacks. All but `should_training_stop` are reset when carried out."""

    should_training_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    @property
    def should_epoch_stop(self) -> bool:
        """Always False: ending an epoch early is not supported."""
        return False

    @should_epoch_stop.setter
    def should_epoch_stop(self, wanted: bool) -> None:
        if wanted:
            raise UserError("control.should_epoch_stop: no epoch ends early here: set should_training_stop")


class CallingTrainer(Protocol):
    """The Trainer that calls a callback."""

    # Its types are here, as `trainer.py` imports this module. `run` is a `harness.training.prepare.run.Run`.
    @property
    def run(self) -> object: ...
    @property
    def console(self) -> Console: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def processing_class(self) -> object: ...
    @property
    def eval_dataset(self) -> object: ...
    def evaluate(self) -> JsonObject: ...
    def save_checkpoint(self) -> Path: ...
    def save_model(self, output_dir: str | Path | None = None) -> Path: ...


class MomentValues(TypedDict, total=False):
    """The keyword arguments of callbacks; only some methods get `record`, `logs`, `metrics` or `checkpoint`."""

    trainer: CallingTrainer
    model: object
    processing_class: object
    optimizer: object
    lr_scheduler: object
    record: StepRecord
    logs: JsonObject
    metrics: JsonObject
    checkpoint: Path


class TrainerCallback:
    """Base class of callbacks: override the methods that you need.

    Keyword arguments: `trainer`; `model`, `processing_class`, `optimizer` and `lr_scheduler` as in HuggingFace; and
    `record`, `logs`, `metrics` or `checkpoint` in the methods whose docstrings name them.

    Attributes:
        reads_weights: whether the callback's methods may read the model's weights. Set it to False in a class that does
            not, so that no step waits for new weights in flight from other ranks.
    """

    reads_weights = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Before the first step."""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """After the Trainer is constructed."""

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Before the first step of an epoch; a step may span the end of an epoch."""

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """After the step that used the last sample of an epoch."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Before each step."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """After each step; `record` is its StepRecord."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Every `logging_steps` and after the last step: `logs` has the step's record and the mean loss since the last
        log. Also after an evaluation and at the end of training: `logs` has their metrics, step and epoch."""

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """After an evaluation; `metrics` holds eval_loss and more."""

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """After a prediction; `metrics` holds test_loss and more."""

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """After a checkpoint is complete; `checkpoint` is its directory, `state` the state when the save began."""

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """After the last step."""


AnyCallback: TypeAlias = TrainerCallback | type[TrainerCallback]
"""A callback or its class."""
MOMENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


def instance(callback: AnyCallback) -> TrainerCallback:
    """Return the callback, or an instance of its class. Raises UserError if a TrainerCallback method is missing."""
    made = callback() if isinstance(callback, type) else callback
    if missing := [name for name in MOMENTS if not callable(getattr(made, name, None))]:
        raise UserError(f"callback {made!r} has no {missing[0]}: derive its class from harness.TrainerCallback")
    return made


def instances(callbacks: Sequence[AnyCallback]) -> list[TrainerCallback]:
    """Return the callbacks of a list of instances and classes. Raises UserError for anything else."""
    if not isinstance(callbacks, Sequence):
        raise UserError("callbacks is not a list: give [callback]")
    return [instance(callback) for callback in callbacks]


def take_out(callbacks: list[TrainerCallback], wanted: AnyCallback) -> TrainerCallback | None:
    """Remove a callback, or the first of a class, from the list. Returns it, or None if it is missing."""
    for index, callback in enumerate(callbacks):
        # A class stands for its subclasses too, as in HuggingFace.
        if callback is wanted or (isinstance(wanted, type) and isinstance(callback, wanted)):
            return callbacks.pop(index)
    return None


def is_default(function: Callable[..., object]) -> bool:
    """Return whether this is a method of TrainerCallback itself (ours or HuggingFace's), which does nothing."""
    # By name: importing transformers' module takes seconds, and a run without its callbacks does not need it.
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return name.startswith((f"{__name__}.TrainerCallback.", "transformers.trainer_callback.TrainerCallback."))


@cache
def reads_between_steps(kind: type) -> bool:
    """Return whether callbacks of this class may read the model's weights between two steps."""
    # The others come when the weights have arrived: after an evaluation, or at the beginning and end of training.
    moments = ("on_step_begin", "on_step_end", "on_log", "on_save", "on_epoch_begin", "on_epoch_end")
    acts = any(hasattr(kind, moment) and not is_default(getattr(kind, moment)) for moment in moments)
    return acts and bool(getattr(kind, "reads_weights", True))


def keywords(function: Callable[..., object], trainer: CallingTrainer) -> dict[str, object]:
    """Return the keyword arguments of GIVEN that a callback's function accepts."""
    taken = parameters_of(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    return {name: make(trainer) for name, make in GIVEN.items() if takes_all or name in taken}


@cache
def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callback's method by name."""
    return inspect.signature(function).parameters
