"""Show the progress of a run: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import NoReturn, Unpack

from tqdm import tqdm

from harness.arguments import TrainingArguments
from harness.arguments.themes.intervals import interval
from harness.console import Console
from harness.training.callbacks import MomentValues, StepRecord, TrainerCallback, TrainerControl, TrainerState

SECONDS_BETWEEN_LINES = 5.0
_MOST_SOURCES = 4  # sources whose losses are shown in a line
NEWEST = 0.2  # weight of the last step in the moving average for the time left
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class ProgressCallback(TrainerCallback):
    """Shows the step's numbers and the time left, on rank 0."""

    reads_weights = False

    def __init__(self, console: Console, unit: str = "tokens") -> None:
        self.console = console
        self.unit = unit  # tokens or samples
        self.bar: tqdm[NoReturn] | None = None
        self._last_line = 0.0
        self._last_step = time.monotonic()
        self._every: int | None = None  # steps between lines, if `logging_steps` is given; None: a line every 5 s
        self._seconds: float | None = None  # moving average of a step's seconds, with logging and saving

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        self._last_line = self._last_step = time.monotonic()
        self._every = interval(args.logging_steps, state.max_steps) if "logging_steps" in args.given else None
        if self.console.speaks and self.console.is_terminal and not args.disable_tqdm:
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                file=self.console.out,
                dynamic_ncols=True,
                bar_format=BAR,
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        record = kwargs["record"]
        now = time.monotonic()
        self._seconds = smoothed(self._seconds, now - self._last_step)
        self._last_step = now
        # Print the first and the last step, and every few steps or seconds in between.
        if self._every is None:
            is_due = now - self._last_line > SECONDS_BETWEEN_LINES
        else:
            is_due = state.global_step % self._every == 0
        if self.bar is None and not is_due and state.global_step not in (1, state.max_steps):
            return
        left = f"{clock((state.max_steps - record.step) * self._seconds)} left"
        if self.bar is not None:
            # The time left comes first, because a narrow terminal cuts off the end.
            self.bar.set_postfix_str(", ".join([left, *_figures(record, self.unit)]), refresh=False)
            self.bar.update()
        else:
            self._last_line = now
            self.console.say("  ".join([f"step {record.step}/{state.max_steps}", *_figures(record, self.unit), left]))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        metrics = kwargs["metrics"]
        key = next(name for name in metrics if name.endswith("_loss"))
        what = "evaluation" if key == "eval_loss" else key.removesuffix("_loss")
        others = {
            name.removeprefix("eval_").removesuffix("_loss"): value
            for name, value in metrics.items()
            if key == "eval_loss" and name != key and name.endswith("_loss") and isinstance(value, float)
        }
        self._above_the_bar(f"step {state.global_step}: {what} loss {metrics[key]:.4f}{_of_sources(others)}")
        self._last_step = time.monotonic()  # do not count the evaluation as time of the next step

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        self._above_the_bar(f"checkpoint in {kwargs['checkpoint']}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _above_the_bar(self, text: str) -> None:
        with nullcontext() if self.bar is None else self.bar.external_write_mode(self.console.out):
            self.console.say(text)


def smoothed(before: float | None, seconds: float) -> float:
    return seconds if before is None else (1 - NEWEST) * before + NEWEST * seconds


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _of_sources(losses: Mapping[str, float]) -> str:
    """Format the losses of up to 4 sources; "" for more, which would crowd out the other numbers."""
    shown = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    return f" ({shown})" if 0 < len(losses) <= _MOST_SOURCES else ""


def _figures(record: StepRecord, unit: str) -> list[str]:
    memory = record.host_memory_gib if record.device_memory_gib is None else record.device_memory_gib
    named = {
        "loss": f"{record.loss:.4f}{_of_sources(record.source_losses)}",
        "aux_loss": None if record.aux_loss is None else f"{record.aux_loss:.4f}",
        "grad_norm": None if record.grad_norm is None else f"{record.grad_norm:.3g}",
        "lr": f"{record.learning_rate:.3g}",
        "epoch": f"{record.epoch:.2f}",
    }
    figures = [f"{name} {value}" for name, value in named.items() if value is not None]
    peak = [] if memory is None else [f"{memory:.1f} GiB"]
    return [*figures, f"{record.tokens_per_second:,.0f} {unit}/s", *peak]
