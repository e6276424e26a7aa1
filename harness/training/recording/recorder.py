"""Record a run on rank 0: metrics, evaluations, samples, `run.json` and monitors."""

from __future__ import annotations

import itertools
import json
import os
import socket
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from io import FileIO
from math import isfinite, nan
from pathlib import Path
from statistics import mean
from types import TracebackType

from harness.arguments.themes.reporting import monitor_sections
from harness.atomic import open_no_link
from harness.checkpoint.directories import EVALUATIONS, METRICS, RUN, set_aside
from harness.config.values.json_file import objects_of_lines
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import Secrets
from harness.console import warn
from harness.errors import UserError, reason
from harness.parallel.collectives import shares_memory
from harness.resilience.process import signals
from harness.resilience.process.activity import inside
from harness.topology.agreement import all_or_none, gather_object
from harness.topology.layout import AXES
from harness.training.callbacks import StepRecord
from harness.training.parts import RunMonitors, needed
from harness.training.parts.data import SamplePrompts
from harness.training.prepare.run import Run
from harness.training.recording.files import note_wall_clock, write_run

SAMPLES = "samples.jsonl"
SHOWN = (
    *("loss", "aux_loss", "grad_norm", "learning_rate", "epoch"),
    *("tokens_per_second", "device_memory_gib", "host_memory_gib"),
)
"""The step values sent to monitors."""


class MetricsFile:
    """Appends JSON objects to a file, one per line. A resumed run first drops the lines after its checkpoint's step."""

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        self._waiting = b""  # lines not yet written
        self._secrets = Secrets.known()
        self._file = self._cut(first_step)

    def write(self, record: StepRecord | JsonObject) -> None:
        """Append one object. If that fails, warn and retry with the next one."""
        content = record.as_dict() if isinstance(record, StepRecord) else record
        # A step's other values are numbers, which need no masking: this runs in every step.
        if content is record or "source_losses" in content:
            content = self._secrets.without(content)
        # Nearly every line is finite: look through its values only if `json` has found one that is not.
        try:
            line = json.dumps(content, default=str, allow_nan=False)
        except ValueError:
            line = json.dumps(_finite(content), default=str)
        self._waiting += f"{line}\n".encode()
        self._attempt(self._flush)

    def rewind(self, step: int) -> None:
        """Drop the lines of steps after `step`."""
        self.close()
        self._attempt(lambda: setattr(self, "_file", self._cut(step + 1)))

    def close(self) -> None:
        """Write waiting lines and close the file."""
        self._attempt(self._flush)
        self._file.close()

    def _flush(self) -> None:
        """Write the waiting lines, to a new file if this one or its folder was deleted."""
        is_there = False
        with suppress(FileNotFoundError):
            is_there = not self._file.closed and os.path.samestat(self._path.lstat(), os.fstat(self._file.fileno()))
        if self._waiting and not is_there:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            gone = self._file
            self._file = self._opened()
            gone.close()
            warn(f"{self._path}: it was deleted; metrics continue in a new file")
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def _cut(self, first_step: int) -> FileIO:
        """Open the file; drop the lines of `first_step` and later steps, and lines that are not metrics."""
        # Opening a pipe would block, and a link may lead to somebody else's file.
        if self._path.is_symlink() or (self._path.exists() and not self._path.is_file()):
            raise UserError(f"{self._path}: it is not a file: move it elsewhere")
        there = self._path.read_bytes() if self._path.is_file() else b""
        lines = (there + self._waiting).splitlines(keepends=True)
        stays = [_is_before(line, first_step) for line in lines]
        # The file is truncated at the first line to drop, which works even on a full disk. Later lines that must stay
        # are rewritten with the next write. `accumulate(stays, min)` is true up to the first line to drop.
        size = min(len(there), sum(map(len, itertools.compress(lines, itertools.accumulate(stays, min)))))
        self._waiting = b"".join(itertools.compress(lines, stays))[size:]
        file = self._opened()
        file.truncate(size)
        return file

    def _opened(self) -> FileIO:
        # Unbuffered, so that a line survives a kill.
        return FileIO(self._path, "ab", opener=open_no_link)

    def _attempt(self, action: Callable[[], None]) -> None:
        # On a full disk, for example, training continues, and lines wait in memory.
        try:
            action()
        except OSError as error:
            warn(f"{self._path}: cannot be written: {reason(error)}; training continues")


class Recorder:
    """Records a run; the training loop runs in this context. Only rank 0 writes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state = state = run.state
        self.writes = state.is_world_process_zero
        self._metrics: MetricsFile | None = None
        self._evaluations: MetricsFile | None = None
        self._samples: MetricsFile | None = None
        self._monitors: RunMonitors | None = None
        self._origin: JsonObject = {}
        self._first_step = 0.0  # seconds of the first step
        self._begun_at = state.global_step
        # The loss of each step since `_begun_at`; NaN for a skipped one. An array, as a run may have millions of steps.
        self._losses = array("d")
        self._unlogged: list[StepRecord] = []

    def __enter__(self) -> Recorder:
        hosts = gather_object(socket.gethostname())
        # Only rank 0 opens files, but if it cannot, all ranks must end.
        all_or_none(lambda: self._begin(hosts) if self.writes else None)
        return self

    def _begin(self, hosts: list[str]) -> None:
        """Write `run.json` before the first step and open the files. Raises UserError if that fails."""
        run = self.run
        directory = run.spec.output_dir
        try:
            directory.mkdir(parents=True, exist_ok=True)
            provenance = run.spec.parts.provenance
            self._origin = {} if provenance is None else provenance(run, hosts)
            write_run(directory, {**self._origin, **describe(run)})
            if sections := monitor_sections(run.spec.args, run.spec.args.output_dir, run.spec.resolved.config):
                open_monitors = needed(run.spec.parts.monitors, "--report_to", "harness.extras")
                self._monitors = open_monitors(sections, run.run_id, self.state.global_step + 1)
            self._metrics = self._open(directory / METRICS)
            self._evaluations = self._open(directory / EVALUATIONS)
            if run.prompts is not None:
                self._samples = self._open(directory / SAMPLES)
        except OSError as error:
            raise UserError(
                f"--output_dir {directory}: cannot be written: {reason(error, directory)}: make room, or give another "
                "directory"
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._metrics, self._evaluations, self._samples, self._monitors):
            if file is not None:
                file.close()
        if self.writes:
            note_wall_clock(self.run.spec.output_dir, self._first_step)

    def rewind(self, step: int) -> None:
        """Drop everything recorded for steps after `step`, which will be repeated."""
        self.state.log_history[:] = [logs for logs in self.state.log_history if logs["step"] <= step]
        del self._losses[max(0, step - self._begun_at) :]
        self._unlogged = [record for record in self._unlogged if record.step <= step]
        for file in (self._metrics, self._evaluations, self._samples, self._monitors):
            if file is not None:
                file.rewind(step)

    def _open(self, path: Path) -> MetricsFile:
        """Open a metrics file for appending; a run from step 1 first renames an earlier run's file."""
        first_step = self.state.global_step + 1
        kept = set_aside(path) if first_step == 1 else None
        if kept is not None:
            self.run.console.warn(f"{path} belongs to an earlier run: kept as {kept.name}")
        return MetricsFile(path, first_step)

    def describe(self) -> None:
        """Write `run.json` again after layers have moved; warn if that fails."""
        if self.writes:
            try:
                write_run(self.run.spec.output_dir, {**self._origin, **describe(self.run)})
            except OSError as error:
                text = f"{self.run.spec.output_dir / RUN}: cannot be written: {reason(error)}; training continues"
                self.run.console.warn(text)

    @inside("logging")
    def step(self, record: StepRecord) -> None:
        """Write one line to metrics.jsonl and keep the step for the next log."""
        if self._metrics is not None:
            self._metrics.write(record)
        self._unlogged.append(record)
        self._losses.append(nan if record.skipped else record.loss)
        self._first_step = self._first_step or record.step_seconds

    @property
    def mean_loss(self) -> float:
        """The mean loss of all steps that were not skipped; 0 without any, as in HuggingFace."""
        counted = [loss for loss in self._losses if isfinite(loss)]
        return mean(counted) if counted else 0.0

    @inside("logging")
    def log(self, record: StepRecord) -> JsonObject:
        """Send a step's values to the monitors, add them to `state.log_history`, and return them.

        As in HuggingFace, losses are means since the last log, without skipped steps; other values are the step's.
        """
        logs = record.as_dict()
        counted = [each for each in self._unlogged if not each.skipped]
        for name in ("loss", "aux_loss"):
            values = [value for each in counted if (value := getattr(each, name)) is not None]
            if values:
                logs[name] = mean(values)
        logs.pop("source_losses", None)
        # Over a dict, not a set, whose order of names would differ between runs.
        of_sources = {
            f"{name}_loss": mean(each.source_losses[name] for each in counted if name in each.source_losses)
            for name in {name: None for each in counted for name in each.source_losses}
        }
        # Not nested: monitors take numbers, not dicts.
        logs |= of_sources
        self._unlogged.clear()
        self.state.log_history.append(logs)
        if self._monitors is not None:
            shown = {f"train/{name}": logs[name] for name in SHOWN if logs.get(name) is not None}
            shown |= {f"train/{name}": value for name, value in of_sources.items()}
            self._monitors.write(shown, self.state.global_step)
        return logs

    @inside("evaluating")
    def evaluation(self, evaluate: Callable[[], JsonObject]) -> JsonObject | None:
        """Evaluate, write a line to evaluations.jsonl and return the metrics; None if a signal interrupts it."""
        try:
            metrics = evaluate()
        except signals.Interrupted:
            return None
        step = self.state.global_step
        if self._evaluations is not None:
            self._evaluations.write({"step": step, **metrics})
        if self._monitors is not None:
            self._monitors.write(_shown(metrics), step)
        if self.run.prompts is not None:
            self._sample(self.run.prompts, step)
        return metrics

    def _sample(self, prompts: SamplePrompts, step: int) -> None:
        """Write the model's continuation of each prompt; all ranks call it."""
        made = prompts.continued(self.run.engine)
        for number, (prompt, text) in enumerate(zip(prompts.texts, made, strict=True), 1):
            self.run.console.say(f"step {step}: sample {number}: {prompt!r} -> {text!r}")
            if self._samples is not None:
                self._samples.write({"step": step, "prompt": prompt, "text": text})
            if self._monitors is not None:
                self._monitors.write_text(f"samples/{number}", f"{prompt}\n\n{text}", step)


def _is_before(line: bytes, first_step: int) -> bool:
    """Return whether a line is complete and of a step before `first_step`."""
    step = next(objects_of_lines(line), {}).get("step")
    return line.endswith(b"\n") and isinstance(step, int) and step < first_step


def _finite(value: object) -> object:
    """Replace NaN and infinity by null in nested values, because JSON has neither."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    # "not less than" is true for NaN too.
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _shown(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return an evaluation's numbers under their monitor names, without perplexity, a function of the loss."""
    left_out = ("eval_samples", "eval_seconds", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    named = {name: value for name, value in metrics.items() if name.startswith("eval_") and name not in left_out}
    return {f"eval/{n.removeprefix('eval_')}": v for n, v in named.items() if isinstance(v, int | float)}


def describe(run: Run) -> JsonObject:
    """Return the content of `run.json`: resolved config, layout, arguments, model shape, stage boundaries."""
    causal = run.trainable.causal
    return {
        "run_id": run.run_id,
        "config": run.spec.resolved.config,
        "filled": [asdict(filled) for filled in run.spec.resolved.filled],
        "layout": {**run.spec.layout.sizes(), "world_size": run.spec.layout.world_size},
        "arguments": {**run.spec.inputs.flags, **asdict(run.spec.args)},
        "given": sorted(run.spec.args.given),
        "model": causal.source.config.to_dict() if causal is not None else {"layers": run.trainable.names},
        "parameters": run.trainable.size(),
        "trained_parameters": run.trainable.size(trained=True),
        "adapters": json.loads(run.spec.adapter_fingerprint) if run.spec.adapter_fingerprint else None,
        "stage_boundaries": run.boundaries,
        "stages": [asdict(line) for line in run.stage_lines],
        "expected": None if run.prediction is None else run.prediction.for_boundaries(run.boundaries).as_json(),
        "shared_memory": [axis for axis in AXES if shares_memory(run.groups.along(axis))],
        "output_dir": str(run.spec.output_dir.resolve()),
    }
