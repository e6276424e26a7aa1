"""Profile some steps of a run (`--profile N`), by a callback that only such runs have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Unpack, cast

from harness.arguments import TrainingArguments
from harness.checkpoint.directories import set_aside
from harness.report.profile.clocks import Clock, Offset, offset_to_first
from harness.report.profile.memory import StepMemory
from harness.report.profile.record import FOLDER, RankProfile, StepProfile, write_object, write_step
from harness.report.profile.spans import SpanLog, log_instructions, log_layers
from harness.report.profile.summary import summary
from harness.report.profile.timeline import trace
from harness.resilience.process.records import THIS_RANK
from harness.topology.agreement import gather_object
from harness.training.callbacks import MomentValues, TrainerCallback, TrainerControl, TrainerState
from harness.training.prepare.run import Run
from harness.wording import counted

WARM_STEPS = 2  # not timed: the first step is slow, and measuring memory slows down the second


class ProfileCallback(TrainerCallback):
    """Profiles `steps` steps after the first two on all ranks; rank 0 writes the results."""

    reads_weights = False

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._first = 0
        self._measuring: _Measurement | None = None
        self._memory: dict[str, int] = {}
        self._boundaries: Sequence[int] = ()  # stage boundaries when the memory was measured
        self._offset = Offset()
        self._profiles: list[StepProfile] = []  # on rank 0
        self._count = 0  # steps profiled so far
        self._is_open = True  # whether more steps will be profiled

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Choose the steps to profile; rename the profile of an earlier run."""
        done = state.global_step
        self._first = done + 1 + min(WARM_STEPS, max(0, state.max_steps - done - self.steps))
        self._profiles = []
        self._count = 0
        self._is_open = True
        if state.is_world_process_zero and done == 0:
            set_aside(Path(args.output_dir) / FOLDER)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Start measuring if this step is to be profiled."""
        self._stop()  # the step before may have failed without on_step_end
        step = state.global_step + 1
        run = cast("Run", kwargs["trainer"].run)
        if self._boundaries != run.boundaries:
            self._memory = {}  # layers have moved
            self._boundaries = run.boundaries
        takes_memory = not self._memory and self._first - 1 <= step < self._first + self.steps
        is_timed = self._first <= step < self._first + self.steps
        if takes_memory or is_timed:
            if step == self._first:
                self._offset = offset_to_first()
            self._measuring = _Measurement(run, is_timed, takes_memory)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Collect the measurements of all ranks on rank 0."""
        measured = self._measuring
        self._stop()
        if measured is None:
            return
        if measured.memory is not None:
            self._memory = measured.memory.end()
        if measured.is_timed:
            run = cast("Run", kwargs["trainer"].run)
            own = replace(measured.profile(run, self._offset.seconds), memory_bytes=self._memory)
            self._keep(run, state.global_step, gather_object(own))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Write the profile, with a warning, if the run ended before all steps were profiled."""
        if self._is_open:
            run = cast("Run", kwargs["trainer"].run)
            self._write(run, [], is_last=True)
            run.console.warn(f"--profile {self.steps}: the run ended after {counted(self._count, 'profiled step')}")

    def _keep(self, run: Run, step: int, ranks: list[RankProfile]) -> None:
        """Write a profiled step, and now and then the summary of all, as a run may be killed at any time.

        `ranks` are the profiles of all ranks on rank 0, and empty elsewhere.
        """
        self._count += 1
        self._is_open = step < self._first + self.steps - 1
        if not ranks:
            return
        profile = step_profile(run, step, ranks)
        if self._profiles and self._profiles[-1].stage_boundaries != profile.stage_boundaries:
            self._profiles = []  # layers have moved
        self._profiles.append(profile)
        self._write(run, [profile], is_last=not self._is_open)

    def _write(self, run: Run, new: Sequence[StepProfile], *, is_last: bool) -> None:
        """Write steps; after the 1st, 2nd, 4th, 8th, ... and the last one, also the summary and the trace of all."""
        folder = run.spec.output_dir / FOLDER
        count = len(self._profiles)
        if not count:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for profile in new:
                write_step(folder, profile)
            if count & (count - 1) == 0 or is_last:
                write_object(folder, "summary.json", summary(self._profiles))
                write_object(folder, "trace.json", trace(self._profiles))
        except OSError as error:
            run.console.warn(f"{folder}: cannot be written: {error.strerror}; training continues")
            return
        if is_last:
            run.console.say(f"profile of {counted(count, 'step')}: {folder} (trace.json opens in ui.perfetto.dev)")

    def _stop(self) -> None:
        if self._measuring is not None:
            self._measuring.close()
            self._measuring = None


class _Measurement:
    """The measurement of one step, begun when it is constructed.

    Attributes:
        memory: the memory of the step; None if only times are measured, as measuring memory slows a step down.
    """

    def __init__(self, run: Run, is_timed: bool, takes_memory: bool) -> None:
        engine = run.engine.deepspeed
        clock = Clock(run.engine.device)
        self.is_timed = is_timed
        self.memory = StepMemory(engine, run.engine.device, run.earlier_peaks) if takes_memory else None
        self._layers = SpanLog(clock)
        self._stack = ExitStack()
        self._instructions = SpanLog(clock, self._layers)
        before_update = self.memory.note_gradients if self.memory is not None else (lambda: None)
        self._stack.enter_context(log_instructions(engine, self._instructions, before_update))
        if is_timed:
            names = run.trainable.names
            self._stack.enter_context(log_layers(run.module, names, self._layers, self._instructions))
        if self.memory is not None:
            self.memory.begin()
        clock.start()
        self._start = time.perf_counter()

    def close(self) -> None:
        """Stop measuring."""
        self._stack.close()
        self._instructions.end_all()

    def profile(self, run: Run, ahead: float) -> RankProfile:
        """Return this rank's profile in seconds of rank 0's clock; this rank's clock is `ahead` seconds ahead of it.

        Waits for the device.
        """
        coordinate = run.groups.coordinate
        instructions = self._instructions.spans(ahead)
        start = self._start - ahead
        return RankProfile(
            rank=run.groups.rank,
            stage=coordinate.stage,
            dp_rank=coordinate.dp_rank,
            tp_rank=coordinate.tp_rank,
            host=THIS_RANK.host,
            start=start,
            end=max((span.end for span in instructions), default=start),
            instructions=instructions,
            layers=self._layers.spans(ahead),
        )


def step_profile(run: Run, step: int, ranks: list[RankProfile]) -> StepProfile:
    """Return the profile of a step, with times counted from its start on the first rank that started it."""
    first = min(rank.start for rank in ranks)
    return StepProfile(
        step=step,
        run_id=run.run_id,
        device=run.engine.device.type,
        layout=run.spec.layout.sizes(),
        stage_boundaries=run.boundaries,
        layer_names=run.trainable.names,
        micro_batches=run.spec.resolved.accumulation,
        schedule=run.spec.resolved.schedule,
        chunks_per_stage=run.spec.resolved.chunks.per_stage,
        ranks=[rank.since(first) for rank in ranks],
    )
