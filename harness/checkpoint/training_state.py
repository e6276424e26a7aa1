"""Save and load what a run needs to go on: weights, what the optimizer keeps, and the counters of the engine.

A checkpoint has no layout. `model.safetensors` holds the weights under HuggingFace's names (float32, as the optimizer
steps on them), one more file for each kind of value that the optimizer keeps for a weight, such as
`exp_avg.safetensors`, the same. `state.json` holds the rest. Random numbers need no state: they are functions of the
seed, the step and the place (`harness/parallel/draws.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from harness.checkpoint.directories import Progress, finish, partial_name, prune, read_progress
from harness.checkpoint.held import Held, held_tensors
from harness.checkpoint.integrity import changed_file, newest, newest_whole
from harness.checkpoint.manifest import contents
from harness.checkpoint.whole_tensors import open_whole_tensors, read_tensors, require_stored, write_tensors
from harness.deepspeed.engine import loss_scaling, set_counters, set_loss_scaling
from harness.deepspeed.flat_tensors import EngineOptimizer, Run, SteppedOn
from harness.deepspeed.optimizer_states import Template, counted, make_state, template, torch_optimizer, use_stepped_on
from harness.errors import UserError
from harness.topology.agreement import all_or_none, values_of_all
from harness.topology.groups import Groups

MODEL, ADAPTERS = "model", "adapter_model"


class NotSaved(UserError):
    """A checkpoint could not be written."""


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What of an engine is saved and loaded.

    Attributes:
        rename: the name in a checkpoint of a tensor of the engine's module.
        adapters: whether adapters are trained; the weights that they stand on are read from where they came.
    """

    engine: DeepSpeedEngine
    groups: Groups
    rename: Callable[[str], str]
    adapters: bool

    @property
    def stem(self) -> str:
        """The name of the file of weights, without its suffix."""
        return ADAPTERS if self.adapters else MODEL

    def held(self) -> list[Held]:
        """Return what this rank holds of the model's tensors."""
        return held_tensors(
            self.engine.module, self.engine.optimizer, self.groups, rename=self.rename, trained_only=self.adapters
        )


def require_savable(state: EngineState) -> None:
    """Raise UserError for an optimizer whose state cannot be saved, before it has trained for hours."""
    _templates(state.engine.optimizer, state.held())


def save(
    state: EngineState,
    output_dir: Path,
    progress: Progress,
    *,
    keep: int | None,
    write_others: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint; all ranks call it. Returns its directory.

    Args:
        keep: how many newest checkpoints remain; None for all.
        write_others: called on rank 0 with the folder, to add files to it.

    Raises NotSaved on all ranks if the files cannot be written; older checkpoints are as they were.
    """
    folder = output_dir / partial_name(progress.step)
    try:
        _write(state, output_dir, folder, progress, write_others)
    except UserError as error:
        if state.groups.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise NotSaved(str(error)) from error
    if state.groups.rank == 0:
        prune(output_dir, newest(output_dir, keep))
    dist.barrier()
    return output_dir / f"checkpoint-{progress.step}"


def _write(
    state: EngineState,
    output_dir: Path,
    folder: Path,
    progress: Progress,
    write_others: Callable[[Path], None] | None,
) -> None:
    """Write all files of a checkpoint to `folder`, and give it its name; all ranks call it, and fail together."""
    first = state.groups.rank == 0

    def begin() -> None:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
        if first and write_others is not None:
            write_others(folder)

    def end() -> None:
        if first:
            finish(output_dir, whole, {name: file for share in shares for name, file in share.items()})

    all_or_none(begin)
    held = state.held()
    write_tensors(folder, state.stem, held, state.groups, one_file=state.adapters)
    names, counters = _write_optimizer(state, folder, held)
    shares = values_of_all(all_or_none(lambda: contents(folder, state.groups.rank, dist.get_world_size())))
    whole = replace(
        progress,
        skipped_steps=state.engine.skipped_steps,
        optimizer_states=names,
        counters=counters,
        loss_scaling=loss_scaling(state.engine.optimizer),
    )
    all_or_none(end)


def load(state: EngineState, checkpoint: Path) -> Progress:
    """Load a checkpoint into the engine; all ranks call it.

    The groups of parameters and the schedule of the learning rate are left as they were built.

    Raises UserError, on all ranks alike, if the model is another than the one that was saved, or a rank cannot read.
    """
    progress = all_or_none(lambda: read_progress(checkpoint))
    optimizer, held = state.engine.optimizer, state.held()
    _read(checkpoint, state.stem, held)
    if progress.optimizer_states:
        templates = _templates(optimizer, held)
        for each in {id(each.tensor): each for each, _ in _stepped(held)}.values():
            make_state(optimizer, each, templates[each.param_group, each.tensor.dim()], progress.counters)
        for name in progress.optimizer_states:
            _read(checkpoint, name, _of_state(optimizer, held, name))
    else:  # an engine that has made steps begins anew
        for each, _ in _stepped(held):
            torch_optimizer(optimizer).state.pop(each.tensor, None)
    use_stepped_on(optimizer)
    set_counters(state.engine, progress.step, progress.skipped_steps)
    set_loss_scaling(optimizer, progress.loss_scaling)
    return progress


def _read(checkpoint: Path, stem: str, held: Sequence[Held]) -> None:
    """Fill what this rank holds from the files `stem`; all ranks call it, and fail together."""
    stored = all_or_none(lambda: open_whole_tensors(checkpoint, stem))
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


def _write_optimizer(state: EngineState, folder: Path, held: Sequence[Held]) -> tuple[list[str], dict[str, float]]:
    """Write what the optimizer keeps for each weight; return its names, and what the optimizer counts."""
    optimizer = state.engine.optimizer
    templates = _templates(optimizer, held)
    counters: dict[str, float] = {}
    for each, _ in _stepped(held):
        counters.update(counted(optimizer, each, templates[each.param_group, each.tensor.dim()]))
    own = [name for name in _kinds(templates.values()) if _of_state(optimizer, held, name)]
    of_all = values_of_all((own, counters))
    names = sorted({name for found, _ in of_all for name in found})
    for name in names:
        write_tensors(folder, name, _of_state(optimizer, held, name), state.groups)
    return names, {name: value for _, found in of_all for name, value in found.items()}


def _templates(optimizer: EngineOptimizer, held: Sequence[Held]) -> dict[tuple[int, int], Template]:
    """Return what the optimizer keeps, by parameter group and by the dimensions of what is stepped on."""
    found: dict[tuple[int, int], Template] = {}
    for each, _ in _stepped(held):
        key = each.param_group, each.tensor.dim()
        if key not in found:
            found[key] = template(optimizer, each)
    return found


def _kinds(templates: Iterable[Template]) -> list[str]:
    return sorted({name for found in templates for name in found.elements})


def _of_state(optimizer: EngineOptimizer, held: Sequence[Held], name: str) -> list[Held]:
    """Return what this rank holds of the values `name` of the optimizer."""
    state = torch_optimizer(optimizer).state
    found = ((each, state.get(each.stepped[0].tensor, {}).get(name)) for each in held if each.stepped is not None)
    return [each.of_state(values) for each, values in found if values is not None]


def _stepped(held: Sequence[Held]) -> list[tuple[SteppedOn, Run]]:
    return [each.stepped for each in held if each.stepped is not None]
