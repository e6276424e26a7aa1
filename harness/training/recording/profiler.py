"""Profile some steps of a run (`--profile N`): a callback, which is there in these runs alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from harness.arguments import TrainingArguments
from harness.checkpoint.directories import set_aside
from harness.report.profile.measuring import (
    Clock,
    Offset,
    SpanLog,
    StepMemory,
    log_instructions,
    log_layers,
    offset_to_first,
)
from harness.report.profile.record import FOLDER, RankProfile, StepProfile, write_object, write_step
from harness.report.profile.summary import summary
from harness.report.profile.timeline import trace
from harness.resilience.process.records import THIS_RANK
from harness.topology.agreement import values_on_first
from harness.training.callbacks import MomentValues, TrainerCallback, TrainerControl, TrainerState
from harness.training.run import Run
from harness.wording import counted

WARM_STEPS = 2  # the first ones take longer; the last of them, the memory of which is measured, too


class ProfileCallback(TrainerCallback):
    """Measures `steps` steps, after the first ones, on all ranks; rank 0 writes what they have found."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._first = 0
        self._measuring: _Measurement | None = None
        self._memory: dict[str, int] = {}
        self._boundaries: Sequence[int] = ()  # of the stages whose memory it is
        self._offset = Offset()
        self._profiles: list[StepProfile] = []  # on rank 0
        self._count = 0  # of the steps profiled
        self._is_open = True  # whether there are steps to come

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Choose the steps; what an earlier run has left gets another name."""
        done = state.global_step
        self._first = done + 1 + min(WARM_STEPS, max(0, state.max_steps - done - self.steps))
        self._profiles, self._count, self._is_open = [], 0, True
        if state.is_world_process_zero and done == 0:
            set_aside(Path(args.output_dir) / FOLDER)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Begin to measure, if this step is one to profile."""
        self._stop()  # a step that failed has not ended
        step, run = state.global_step + 1, kwargs["trainer"].run
        if self._boundaries != run.boundaries:
            self._memory, self._boundaries = {}, run.boundaries  # layers have moved
        takes_memory = not self._memory and self._first - 1 <= step < self._first + self.steps
        is_timed = self._first <= step < self._first + self.steps
        if takes_memory or is_timed:
            if step == self._first:
                self._offset = offset_to_first(f"step {step}")
            self._measuring = _Measurement(run, is_timed, takes_memory)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Take what was measured, of all ranks on rank 0."""
        measured = self._measuring
        self._stop()
        if measured is None:
            return
        if measured.memory is not None:
            self._memory = measured.memory.end()
        if measured.is_timed:
            run = kwargs["trainer"].run
            own = replace(measured.profile(run, self._offset.seconds), memory_bytes=self._memory)
            self._keep(run, state.global_step, values_on_first(own))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Unpack[MomentValues]
    ) -> None:
        """Finish, and say so, if there were fewer steps than were asked for."""
        if self._is_open:
            run = kwargs["trainer"].run
            self._write(run, [], is_last=True)
            run.console.warn(f"--profile {self.steps}: the run ended after {counted(self._count, 'profiled step')}")

    def _keep(self, run: Run, step: int, ranks: list[RankProfile]) -> None:
        """Write the step, and from time to time what all of them say together: a run may be killed at any time.

        `ranks`: on rank 0 the profiles of all ranks, elsewhere nothing.
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
        """Write steps, and after the first, the second, the fourth, ... and the last one what all say together."""
        folder, count = run.output_dir / FOLDER, len(self._profiles)
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
    """One step that is measured, from its begin on.

    Attributes:
        memory: None where memory is not measured, as that makes a step slower.
    """

    def __init__(self, run: Run, is_timed: bool, takes_memory: bool) -> None:
        engine, clock, self.is_timed = run.engine.deepspeed, Clock(run.engine.device), is_timed
        self.memory = StepMemory(engine, run.engine.device) if takes_memory else None
        self._layers, self._stack = SpanLog(clock), ExitStack()
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
        """Return this rank's part, in seconds of rank 0's clock. Waits for the device."""
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
    """Return the profile of a step: times count from the moment in which the first rank began it."""
    first = min(rank.start for rank in ranks)
    return StepProfile(
        step=step,
        run_id=run.run_id,
        device=run.engine.device.type,
        layout=run.layout.sizes(),
        stage_boundaries=run.boundaries,
        layer_names=run.trainable.names,
        micro_batches=run.resolved.accumulation,
        schedule=run.resolved.schedule,
        parts_per_stage=run.resolved.chunks.each,
        ranks=[rank.since(first) for rank in ranks],
    )
