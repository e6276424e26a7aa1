"""What the user sees while a run goes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Any

from tqdm import tqdm

from harness.training.arguments import TrainingArguments
from harness.training.callbacks import StepRecord, TrainerCallback, TrainerControl, TrainerState
from harness.training.console import Console

SECONDS_BETWEEN_LINES = 5.0


class ProgressCallback(TrainerCallback):
    """Loss, tokens per second and time left, on rank 0."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: tqdm[Any] | None = None
        self._last_line = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._last_line = time.monotonic()
        if self.console.speaks and self.console.is_terminal:
            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, file=self.console.out, unit="step", dynamic_ncols=True
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        record: StepRecord = kwargs["record"]
        if self.bar is not None:
            losses = _losses(record, ", ")
            self.bar.set_postfix_str(f"{losses}, {record.tokens_per_second:,.0f} tokens/s", refresh=False)
            self.bar.update()
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES or record.step in (1, state.max_steps):
            self._last_line = time.monotonic()
            left = (state.max_steps - record.step) * record.step_seconds
            self.console.say(
                f"step {record.step}/{state.max_steps}  {_losses(record, '  ')}  "
                f"{record.tokens_per_second:,.0f} tokens/s  {left:.0f} s left"
            )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss: float = kwargs["metrics"]["eval_loss"]
        self._above_the_bar(f"step {state.global_step}: evaluation loss {loss:.4f}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._above_the_bar(f"checkpoint in {kwargs['checkpoint']}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _above_the_bar(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text, file=self.console.out)
        else:
            self.console.say(text)


def _losses(record: StepRecord, between: str) -> str:
    router = "" if record.aux_loss is None else f"{between}aux_loss {record.aux_loss:.4f}"
    return f"loss {record.loss:.4f}{router}"
