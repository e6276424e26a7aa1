"""Load what a run needs to go on: weights, what the optimizer keeps, and the counters of the engine.

A checkpoint has no layout. `model.safetensors` holds the weights under HuggingFace's names (float32, as the optimizer
steps on them), one more file for each kind of value that the optimizer keeps for a weight, such as
`exp_avg.safetensors`, the same. `state.json` holds the rest. Random numbers need no state: they are functions of the
seed, the step and the place (`harness/parallel/draws.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from harness.checkpoint.directories import TrainingProgress, read_progress
from harness.checkpoint.engine_state import EngineState, of_state, stepped, templates
from harness.checkpoint.integrity import changed_file, newest_whole
from harness.checkpoint.manifest import read_manifest
from harness.checkpoint.tensors.local_shard import LocalShard
from harness.checkpoint.tensors.whole_tensors import open_whole_tensors, read_tensors, require_stored
from harness.deepspeed.engine import set_counters, set_loss_scaling
from harness.deepspeed.nvme_states import states_in_memory
from harness.deepspeed.optimizer_states import make_state, torch_optimizer, use_stepped_on
from harness.errors import UserError
from harness.topology.agreement import all_or_none, values_of_all


def load(state: EngineState, checkpoint: Path) -> TrainingProgress:
    """Load a checkpoint into the engine; all ranks call it.

    The groups of parameters and the schedule of the learning rate are left as they were built.

    Raises UserError, on all ranks alike, if the model is another than the one that was saved, or a rank cannot read.
    """
    progress = all_or_none(lambda: read_progress(checkpoint))
    listed = all_or_none(lambda: read_manifest(checkpoint).files)
    restore(state, progress, lambda stem, held: _read(checkpoint, stem, listed, held))
    return progress


def restore(state: EngineState, progress: TrainingProgress, fill: Callable[[str, Sequence[LocalShard]], None]) -> None:
    """Bring an engine to where `progress` says that a run stood; all ranks call it.

    Args:
        fill: called with the name of a file of a checkpoint and what this rank holds of its tensors; all ranks call it
            in the same order.
    """
    optimizer = state.engine.optimizer
    with states_in_memory(optimizer, changed=True):
        _restore_tensors(state, progress, fill)
    set_counters(state.engine, progress.step, progress.skipped_steps)
    set_loss_scaling(optimizer, progress.loss_scaling)


def _restore_tensors(
    state: EngineState, progress: TrainingProgress, fill: Callable[[str, Sequence[LocalShard]], None]
) -> None:
    optimizer, held = state.engine.optimizer, state.held()
    fill(state.stem, held)
    if progress.optimizer_states:
        found = templates(optimizer, held)
        for each in {id(each.tensor): each for each, _ in stepped(held)}.values():
            make_state(optimizer, each, found[each.param_group, each.tensor.dim()], progress.counters)
        for name in progress.optimizer_states:
            fill(name, of_state(optimizer, held, name))
    else:  # an engine that has made steps begins anew
        for each, _ in stepped(held):
            torch_optimizer(optimizer).state.pop(each.tensor, None)
    use_stepped_on(optimizer)


def _read(checkpoint: Path, stem: str, listed: Iterable[str], held: Sequence[LocalShard]) -> None:
    """Fill what this rank holds from the listed files `stem`; all ranks call it, and fail together."""
    stored = open_whole_tensors(checkpoint, stem, listed, {each.name for each in held})
    require_stored(checkpoint, stored, held)
    all_or_none(lambda: read_tensors(stored, held))


def first_unchanged(checkpoint: Path | None, output_dir: Path, *, auto: bool) -> tuple[Path | None, list[str]]:
    """Return the checkpoint, or with `auto` the newest older one, all of whose files are what was saved; all ranks
    call it.

    Returns with it what is wrong with those that are left out. Raises UserError, on all ranks alike, if the one that
    was named is damaged.
    """
    left_out: list[str] = []
    while checkpoint is not None:
        found = changed_file(checkpoint, dist.get_rank(), dist.get_world_size())
        reason = next(filter(None, values_of_all(found)), None)
        if reason is None:
            break
        left_out.append(f"{checkpoint} is damaged ({reason})")
        if not auto:
            raise UserError(f"{left_out[0]}: resume from another checkpoint")
        checkpoint = newest_whole(output_dir, before=checkpoint)
    return checkpoint, left_out
