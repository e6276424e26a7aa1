"""Balance the pipeline's stages by measured time while a run trains (`--rebalance_steps`).

Every `--rebalance_steps` steps the ranks compare the computing times of their stages. The measured time of a model
chunk scales the estimated costs of its layers. If another partition would shorten a step by more than `MIN_GAIN`,
layers move. The next comparison reports the gain; without any, the layers move back and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

import torch
from torch import nn

from harness.checkpoint.directories import TrainingProgress
from harness.checkpoint.tensors.local_shard import LocalShard
from harness.config.values.step_time import pipeline_seconds
from harness.deepspeed.schedule import Observer, Operands
from harness.device.moments import Moment, moment, seconds_between
from harness.extras.rebalancing.exchange import exchange
from harness.parallel.pipeline.partition import balanced
from harness.resilience.process.activity import ACTIVITY, inside
from harness.topology.agreement import all_gather_object
from harness.training.callbacks import StepRecord
from harness.training.engine.build import build_engine
from harness.training.prepare.run import Run
from harness.training.prepare.stages import stage_costs, stage_lines
from harness.training.saving.checkpoints import progress_of

COMPUTING = ("ForwardPass", "BackwardPass", "InputGradients", "WeightGradients")
MIN_GAIN = 0.05  # share of a step: less may be noise, and a move takes as long as several steps


@dataclass
class StageClock:
    """Measures the time of a pipeline's computing instructions.

    On an accelerator, which executes asynchronously, the times are those of device events.
    """

    device: torch.device
    _spans: list[tuple[int, Moment, Moment]] = field(default_factory=list)
    _open: tuple[int, Moment] | None = None

    def begin(self, instruction: str, chunk: int) -> None:
        """Record that an instruction begins in a model chunk, and that the one before has ended."""
        if self._open is not None:
            self._spans.append((*self._open, moment(self.device)))
        self._open = (chunk, moment(self.device)) if instruction in COMPUTING else None

    def take(self) -> dict[int, float]:
        """Return the seconds of computing since the last call, by chunk; waits for the device."""
        spans = self._spans
        self._spans = []
        found: dict[int, float] = {}
        for chunk, start, stop in spans:
            found[chunk] = found.get(chunk, 0.0) + seconds_between(start, stop)
        return found


@inside("rebalancing")
def move_layers(run: Run, boundaries: list[int], progress: TrainingProgress) -> None:
    """Give the run new stage boundaries, and a new engine in the same state; all ranks call it.

    A rank's tensors are kept in host memory while the new engine is built, so that the device never holds both.
    """
    trainable = run.trainable
    files, progress = run.engine_state.stored(progress)
    kept = {stem: [_on_host(held) for held in tensors] for stem, tensors in files}
    files.clear()  # otherwise these references would keep the old engine's tensors alive
    run.engine.release()
    run.engine = build_engine(run.spec, run.groups, trainable.layers, boundaries, trainable.loss, trainable.traits)
    run.boundaries = boundaries
    run.stage_lines = stage_lines(trainable, boundaries, run.module, run.spec.resolved.chunks, run.groups)
    ACTIVITY.stage_costs = stage_costs(trainable.costs, boundaries, run.spec.resolved.chunks)

    def fill(stem: str, want: Sequence[LocalShard]) -> None:
        exchange(kept.pop(stem), want, run.groups.coordinate.stage, run.groups.device)

    run.engine_state.restore(progress, fill)
    run.engine.schedule.go_to(progress.step - progress.skipped_steps)


def _on_host(held: LocalShard) -> LocalShard:
    """Return the shard with a copy of its values in host memory, which outlives the engine."""
    return replace(held, values=held.values.to("cpu", copy=True), updated=None)


@dataclass
class Rebalancer:
    """Measures the stages of a run, and moves layers between them; all ranks call `after_step`.

    Attributes:
        run: the run; its engine, boundaries and stages are replaced when layers move.
    """

    run: Run
    _clock: StageClock = field(init=False)
    _computed: list[dict[int, float]] = field(default_factory=list)  # of each step: seconds by chunk
    _steps: list[float] = field(default_factory=list)
    _before: tuple[list[int], float] | None = None  # boundaries and seconds of a step, before the last move
    _is_warm: bool = False
    _goes_on: bool = True

    def __post_init__(self) -> None:
        """Start measuring; warn if layers cannot move."""
        problem = obstacle(self.run)
        self._goes_on = problem is None
        if problem is not None:
            self.run.console.warn(f"--rebalance_steps {self.run.spec.args.rebalance_steps} has no effect: {problem}")
        self._measure()

    def after_step(self, record: StepRecord) -> bool:
        """Record the times of a step; every `rebalance_steps` steps, compare them. Return whether layers have moved."""
        before = self.run.engine
        computed = self._clock.take()
        if self._is_warm:
            self._computed.append(computed)
            self._steps.append(record.step_seconds)
        self._is_warm = True  # the first step after a start, or a move, takes longer
        if self._goes_on and self._steps and record.step % (self.run.spec.args.rebalance_steps or 1) == 0:
            self._compare()
        return self.run.engine is not before

    def _compare(self) -> None:
        chunks, accumulation = self.run.spec.resolved.chunks, self.run.spec.resolved.accumulation
        computed = {
            chunk: median(of_step.get(chunk, 0.0) for of_step in self._computed) / accumulation
            for chunk in chunks.of_stage(self.run.groups.coordinate.stage)
        }
        # The median, so that one slow step does not move layers. A chunk takes as long as its slowest rank.
        of_all = all_gather_object((computed, median(self._steps)))
        step_seconds = max(seconds for _, seconds in of_all)
        of_chunks = [max(found[chunk] for found, _ in of_all if chunk in found) for chunk in range(chunks.count)]
        self._computed = []
        self._steps = []
        if self._before is not None and not self._has_gained(step_seconds):
            return
        costs = corrected(self.run.trainable.costs, self.run.boundaries, of_chunks)
        boundaries = balanced(costs, chunks.count)
        now, after = (stage_costs(costs, cut, chunks) for cut in (self.run.boundaries, boundaries))
        how = accumulation, self.run.spec.resolved.schedule, chunks.per_stage
        gain = 1 - pipeline_seconds(after, *how) / pipeline_seconds(now, *how)
        if gain > MIN_GAIN and all(sum(self.run.trainable.trained[a:b]) for a, b in pairwise(boundaries)):
            self._before = self.run.boundaries, step_seconds
            time = f"{step_seconds:.3g} s"
            self._move(boundaries, f"a step takes {time}; moving layers should make it {gain:.0%} shorter")

    def _has_gained(self, now: float) -> bool:
        """Report the gain of the last move and return whether there was one; if not, move back and stop."""
        assert self._before is not None
        boundaries, before = self._before
        self._before = None
        gain = 1 - now / before
        if gain > 0:
            self.run.console.say(f"rebalanced: a step takes {now:.3g} s, {gain:.0%} less than before")
            return True
        self._goes_on = False
        times = f"{now:.3g} s instead of {before:.3g} s"
        self._move(boundaries, f"a step takes {times}: the layers move back and rebalancing stops")
        return False

    def _move(self, boundaries: list[int], reason: str) -> None:
        self.run.console.say(f"rebalancing: {reason}")
        move_layers(self.run, boundaries, progress_of(self.run))
        for line in self.run.stage_lines:
            self.run.console.say(str(line))
        self._measure()

    def _measure(self) -> None:
        """Start measuring the current engine."""
        engine = self.run.engine.deepspeed
        self._is_warm = False
        self._clock = clock = StageClock(self.run.groups.device)
        if self._goes_on:
            stage = self.run.groups.coordinate.stage

            def begin(name: str, place: Operands) -> None:
                clock.begin(name if engine.module.training else "", place.get("chunk", stage))

            engine.observe(Observer(begin=begin))


def obstacle(run: Run) -> str | None:
    """Return why the layers of a run cannot move; None if they can."""
    if run.spec.layout.pp_size == 1:
        return "there is one pipeline stage"
    if any(isinstance(layer, nn.Module) for layer in run.trainable.layers):
        return "the list of layers has modules, which cannot be built once more: give LayerSpecs"
    return None


def corrected(costs: Sequence[float], boundaries: Sequence[int], chunks: Sequence[float]) -> list[float]:
    """Scale the estimated costs of layers to seconds, so that those of each chunk add up to its measured time."""
    found: list[float] = []
    for (start, stop), seconds in zip(pairwise(boundaries), chunks, strict=True):
        own = costs[start:stop] if any(costs[start:stop]) else [1.0] * (stop - start)
        found += [cost * seconds / sum(own) for cost in own]
    return found
