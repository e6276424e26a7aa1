"""What can happen at the usual moments of a run, shaped as HuggingFace's TrainerCallback.

Callbacks are called on every rank. What they ask for through `TrainerControl` is agreed over all ranks before it is
done: if one rank's callback asks, all ranks act.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypedDict, Unpack

from harness.arguments import TrainingArguments
from harness.config.values.json_object import JsonObject
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, as `metrics.jsonl` holds it.

    Attributes:
        loss: mean over the valid labels of the global batch; the router loss included, where there is one.
        aux_loss: the router loss before its coefficient, mean over the micro-batches; None where there is none.
        source_losses: where the data has several sources, the mean over the valid labels of each that has some, by its
            name; without the router loss.
        grad_norm: global norm before clipping; None where an overflow left none.
        learning_rate: the rate this step used.
        tokens_per_second: of the whole run, all ranks together (samples for a model without tokens).
        consumed_samples: all samples the run has seen, this step's included.
        epoch: consumed samples as passes through the data.
        device_memory_gib, host_memory_gib: peak so far of the rank that needs most; None without a device.
        skipped: whether the step changed no weight, as its loss or gradient was not finite.
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
    device_memory_gib: float | None = None
    host_memory_gib: float | None = None
    skipped: bool = False

    def as_dict(self) -> JsonObject:
        """Return the record as it is written: router loss, losses of sources and memory only where there are some,
        `skipped` only where it is true."""
        names = ("aux_loss", "device_memory_gib", "host_memory_gib")
        optional = {name: getattr(self, name) is not None for name in names}
        optional |= {"skipped": self.skipped, "source_losses": bool(self.source_losses)}
        return {name: value for name, value in asdict(self).items() if optional.get(name, True)}


NOT_IN_STATE = {
    "total_flos": "6 x parameters x tokens; trainer.get_num_trainable_parameters() counts the former",
    "num_input_tokens_seen": "state.consumed_samples times the length of a sample",
    **dict.fromkeys(
        ("is_hyper_param_search", "trial_name", "trial_params"), "start a run for each choice of arguments"
    ),
    "stateful_callbacks": "a callback keeps its state itself",
}


@dataclass
class TrainerState:
    """Where the run stands.

    Attributes:
        best_metric, best_global_step: of the best evaluation so far.
        best_model_checkpoint, best_saved_metric: the newest whole checkpoint of a best evaluation, and its metric.
        num_train_epochs: passes through the data that the run begins, 0 without data or end of it.
        train_batch_size: samples of a micro-batch.
        consumed_samples: those that all ranks together have used or left out.
        skipped_samples: where batches are left out, as a rollback found: the place of the first sample, past the last.
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

    if not TYPE_CHECKING:  # a type checker knows the fields

        def __getattr__(self, name: str) -> NoReturn:
            """Say what to read in the place of a field of HuggingFace's state that there is not."""
            if name in NOT_IN_STATE:
                raise AttributeError(f"state.{name} is a field of HuggingFace's TrainerState: {NOT_IN_STATE[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state to a file."""
        Path(json_path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


@dataclass
class TrainerControl:
    """What a callback may ask for. All but `should_training_stop` are reset once it is done."""

    should_training_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    @property
    def should_epoch_stop(self) -> bool:
        """Whether the epoch is to end early, which is never done here."""
        return False

    @should_epoch_stop.setter
    def should_epoch_stop(self, wanted: bool) -> None:
        if wanted:
            raise UserError("control.should_epoch_stop: no epoch ends early here: set should_training_stop")


class MomentValues(TypedDict, total=False):
    """The keyword arguments of callbacks: `trainer`, and the others at the moments that they belong to."""

    trainer: Trainer
    model: object
    processing_class: object
    optimizer: object
    lr_scheduler: object
    record: StepRecord
    logs: JsonObject
    metrics: JsonObject
    checkpoint: Path


class TrainerCallback:
    """Override what you need. Keyword arguments: `trainer`; `model`, `processing_class`, `optimizer` and `lr_scheduler`
    as in HuggingFace; `record`, `logs`, `metrics` or `checkpoint` where they fit."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Before the first step."""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """After the Trainer was made."""

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Before the first step of a pass through the data; a step may reach from one pass into the next."""

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """After the step that used the last sample of a pass through the data."""

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
        """Every `logging_steps` and after the last step: `logs` is the step's record as a dict, with the mean loss
        since the last log. After an evaluation and at the end: it holds their metrics, with step and epoch."""

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
        """After a checkpoint was written; `checkpoint` is its directory, `state` is as it was when it began."""

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """After the last step."""


AnyCallback: TypeAlias = TrainerCallback | type[TrainerCallback]
"""A callback, or the class of one."""
MOMENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


def instance(callback: AnyCallback) -> TrainerCallback:
    """Return the callback itself, or one of the class; UserError for what is no callback, ours or transformers'."""
    made = callback() if isinstance(callback, type) else callback
    if missing := [name for name in MOMENTS if not callable(getattr(made, name, None))]:
        raise UserError(f"callback {made!r} has no {missing[0]}: derive its class from harness.TrainerCallback")
    require_called(made, MOMENTS)
    return made


def instances(callbacks: Sequence[AnyCallback]) -> list[TrainerCallback]:
    """Return the callbacks of a list that may name classes; UserError for anything else."""
    if not isinstance(callbacks, Sequence):
        raise UserError("callbacks is no list: give [callback]")
    return [instance(callback) for callback in callbacks]


def take_out(callbacks: list[TrainerCallback], wanted: AnyCallback) -> TrainerCallback | None:
    """Remove a callback, or the first of a class, from the list and return it; None if it is not there."""
    for index, callback in enumerate(callbacks):
        if callback is wanted or (isinstance(wanted, type) and type(callback) is wanted):
            return callbacks.pop(index)
    return None


GIVEN: Mapping[str, Callable[[Trainer], object]] = {
    "trainer": lambda trainer: trainer,
    "model": lambda trainer: trainer.model,
    "processing_class": lambda trainer: trainer.processing_class,
    "optimizer": lambda trainer: trainer.engine.deepspeed.optimizer,
    "lr_scheduler": lambda trainer: trainer.engine.deepspeed.lr_scheduler,
}
"""Keywords of every moment, and what makes them of the Trainer."""

NOT_GIVEN = {
    "tokenizer": "name it processing_class",
    "train_dataloader": "there is none here: take trainer.train_dataset",
    "eval_dataloader": "there is none here: take trainer.eval_dataset",
}

NOT_CALLED = {
    "on_substep_end": "on_step_end",
    "on_pre_optimizer_step": "on_step_end",
    "on_optimizer_step": "on_step_end",
    "on_prediction_step": "on_evaluate or on_predict",
    "on_push_begin": "on_save",
}
"""HuggingFace's moments that do not exist here, and what to use instead."""


def keywords(method: Callable[..., object], trainer: Trainer) -> dict[str, object]:
    """Return those of the keywords of every moment that a callback's method takes."""
    taken = _parameters(getattr(method, "__func__", method))
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    return {name: make(trainer) for name, make in GIVEN.items() if takes_all or name in taken}


def require_called(callback: object, moments: Collection[str]) -> None:
    """Raise UserError if a callback of the user's own has a method that is never called, or that names a keyword which
    is never given."""
    for name in (*NOT_CALLED, *moments):
        method = getattr(callback, name, None)
        if method is None or getattr(method, "__module__", "").startswith("transformers."):
            continue
        where = f"{type(callback).__name__}.{name}"
        if name in NOT_CALLED:
            raise UserError(f"callback {where} is never called here: use {NOT_CALLED[name]}")
        for keyword in _parameters(getattr(method, "__func__", method)).keys() & NOT_GIVEN.keys():
            raise UserError(f"callback {where} takes {keyword}: {NOT_GIVEN[keyword]}")


@cache
def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
