"""Move layers between pipeline stages, in memory and in the same processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.checkpoint.directories import Progress
from harness.checkpoint.engine_state import stored
from harness.checkpoint.tensors.exchange import exchange
from harness.checkpoint.tensors.held import Held
from harness.checkpoint.training_state import restore
from harness.resilience.watch.activity import expect_costs, inside
from harness.training.engine.build import build_engine
from harness.training.prepare.run import PreparedRun, release_engine
from harness.training.prepare.stages import stage_costs, stage_lines


@inside("rebalancing")
def recut(run: PreparedRun, boundaries: list[int], progress: Progress) -> PreparedRun:
    """Return the run with other stage boundaries and a new engine in the same state; all ranks call it.

    What a rank held waits in the host's memory while the new engine is built, so that the device never holds both.
    """
    context, trainable = run.context, run.trainable
    files, progress = stored(run.engine_state, progress)
    kept = {stem: [_on_host(held) for held in tensors] for stem, tensors in files}
    files.clear()
    release_engine(run.engine)
    engine = build_engine(context, trainable.layers, boundaries, trainable.loss, trainable.traits)
    stages = stage_lines(trainable, boundaries, engine.deepspeed.module, context)
    run = replace(run, boundaries=boundaries, engine=engine, stages=stages)
    expect_costs(stage_costs(trainable.costs, boundaries, run.resolved.parts))

    def fill(stem: str, want: Sequence[Held]) -> None:
        exchange(kept.pop(stem), want, context.groups.coordinate.stage, context.device)

    restore(run.engine_state, progress, fill)
    engine.schedule.go_to(progress.step - progress.skipped_steps)
    return run


def _on_host(held: Held) -> Held:
    """Return what is held with a copy of its values, which outlives the engine."""
    return replace(held, values=held.values.to("cpu", copy=True), stepped=None)
