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
from harness.training.prepare.run import release_engine
from harness.training.prepare.stages import stage_costs, stage_lines
from harness.training.run import Run


@inside("rebalancing")
def move_layers(run: Run, boundaries: list[int], progress: Progress) -> None:
    """Give the run other stage boundaries and a new engine in the same state; all ranks call it.

    What a rank held waits in the host's memory while the new engine is built, so that the device never holds both.
    """
    trainable = run.trainable
    files, progress = stored(run.engine_state, progress)
    kept = {stem: [_on_host(held) for held in tensors] for stem, tensors in files}
    files.clear()
    release_engine(run.engine)
    run.engine = build_engine(run, trainable.layers, boundaries, trainable.loss, trainable.traits)
    run.boundaries, run.stages = boundaries, stage_lines(trainable, boundaries, run.module, run)
    expect_costs(stage_costs(trainable.costs, boundaries, run.resolved.parts))

    def fill(stem: str, want: Sequence[Held]) -> None:
        exchange(kept.pop(stem), want, run.groups.coordinate.stage, run.device)

    restore(run.engine_state, progress, fill)
    run.engine.schedule.go_to(progress.step - progress.skipped_steps)


def _on_host(held: Held) -> Held:
    """Return what is held with a copy of its values, which outlives the engine."""
    return replace(held, values=held.values.to("cpu", copy=True), stepped=None)
