"""Writes what a run leaves behind, on rank 0: metrics, evaluations, `run.json`, and DeepSpeed's monitors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from harness.training.callbacks import StepRecord
from harness.training.process import signals
from harness.training.report.metrics import METRICS, MetricsFile, set_aside, write_run

if TYPE_CHECKING:
    from harness.training.trainer import Trainer

EVALUATIONS = "evaluations.jsonl"


class Recorder:
    """Open while a run goes on; on ranks other than 0 it does nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.writes = trainer.state.is_world_process_zero
        self._metrics: MetricsFile | None = None
        self._evaluations: MetricsFile | None = None

    def __enter__(self) -> Recorder:
        if self.writes:
            directory = self.trainer.output_dir
            directory.mkdir(parents=True, exist_ok=True)
            write_run(directory, describe(self.trainer))
            self._metrics = self._open(directory / METRICS)
            self._evaluations = self._open(directory / EVALUATIONS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._metrics, self._evaluations):
            if file is not None:
                file.close()

    def _open(self, path: Path) -> MetricsFile:
        """The file as far as this run has come; a run that begins keeps what an earlier one left under another name."""
        first_step = self.trainer.state.global_step + 1
        kept = set_aside(path) if first_step == 1 else None
        if kept is not None:
            self.trainer.console.warn(f"{path} is of an earlier run: kept as {kept.name}")
        return MetricsFile(path, first_step)

    def step(self, record: StepRecord) -> None:
        """One line in metrics.jsonl."""
        if self._metrics is not None:
            self._metrics.write(record)

    def log(self, logs: dict[str, Any]) -> None:
        """Hand the step's figures to the monitors, and keep them in the trainer's history."""
        self.trainer.state.log_history.append(logs)
        names = ("loss", "aux_loss", "grad_norm", "learning_rate", "tokens_per_second")
        self._monitor({f"train/{name}": logs[name] for name in names if logs.get(name) is not None})

    def evaluation(self, evaluate: Callable[[], dict[str, float]]) -> None:
        """Evaluate, and write one line in evaluations.jsonl; write nothing if a signal interrupts it."""
        try:
            metrics = evaluate()
        except signals.Interrupted:
            return
        step = self.trainer.state.global_step
        self.trainer.state.log_history.append({"step": step, **metrics})
        if self._evaluations is not None:
            self._evaluations.write({"step": step, **metrics})
        self._monitor({"eval/loss": metrics["eval_loss"]})

    def _monitor(self, values: dict[str, float]) -> None:
        monitor = self.trainer.engine.deepspeed.monitor
        if self.writes and monitor.enabled:
            step = self.trainer.state.global_step
            monitor.write_events([(name, value, step) for name, value in values.items()])


def describe(trainer: Trainer) -> dict[str, Any]:
    """What `run.json` holds: resolved config, layout, arguments, model shape, stage boundaries."""
    causal = trainer.trainable.causal
    arguments = asdict(trainer.args)
    arguments["deepspeed_config"] = str(arguments["deepspeed_config"])
    return {
        "config": trainer.resolved.config,
        "filled": [asdict(filled) for filled in trainer.resolved.filled],
        "layout": {**trainer.layout.sizes(), "world_size": trainer.layout.world_size},
        "arguments": arguments,
        "model": causal.source.config.to_dict() if causal is not None else {"layers": trainer.trainable.names},
        "parameters": trainer.trainable.size(),
        "trained_parameters": trainer.trainable.size(trained=True),
        "adapters": json.loads(trainer.adapters) if trainer.adapters else None,
        "stage_boundaries": trainer.boundaries,
        "stages": [asdict(line) for line in trainer.stages],
        "output_dir": str(Path(trainer.output_dir).resolve()),
    }
