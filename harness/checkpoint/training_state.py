"""What a run needs to go on: weights, what the optimizer keeps, the counters of the engine; taken from it and restored.

A checkpoint has no layout. `model.safetensors` holds the weights under HuggingFace's names (float32, as the optimizer
steps on them). One more file for each kind of value that the optimizer keeps for a weight, such as
`exp_avg.safetensors`, has the same names. `state.json` holds the rest. Random numbers need no state: they are functions
of the seed, the step and the place (`harness/parallel/draws.py`).

One thing belongs to a rank and its layers: what compressed gradients have lost to rounding so far (the residue). Only a
run in the same layout goes on with it, then with the same numbers to the bit. Any other begins without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from harness.checkpoint.directories import TrainingProgress, read_manifest, read_progress
from harness.checkpoint.integrity import changed_file, newest_whole
from harness.checkpoint.tensors.local_shard import LocalShard, local_shards
from harness.checkpoint.tensors.tensor_writer import require_storable
from harness.checkpoint.tensors.whole_tensors import (
    entry_of,
    open_whole_tensors,
    read_tensors,
    require_each_value_once,
    require_stored,
)
from harness.deepspeed.engine import loss_scaling, set_counters, set_loss_scaling
from harness.deepspeed.flat_tensors import EngineOptimizer, Run, SteppedOn
from harness.deepspeed.optimizer_states import (
    Counter,
    Template,
    counted,
    make_state,
    states_in_memory,
    template,
    torch_optimizer,
    use_stepped_on,
)
from harness.errors import UserError
from harness.parallel.gradients.compressed import CompressedReduction
from harness.parallel.host import numbers
from harness.topology.agreement import all_or_none, value_of_first, values_of_all
from harness.topology.groups import Groups

MODEL, ADAPTERS = "model", "adapter_model"


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What of an engine is saved and loaded.

    Attributes:
        rename: the name in a checkpoint of a tensor of the engine's module.
        adapters: whether adapters are trained; the weights that they stand on are read from where they came.
        compression: averages the gradients in few bits; None where they are not compressed.
        one_host: whether all ranks are on one host, so that what one writes the others can read before it is on the
            disk.
    """

    engine: DeepSpeedEngine
    groups: Groups
    rename: Callable[[str], str]
    adapters: bool
    compression: CompressedReduction | None = None
    one_host: bool = False

    @property
    def stem(self) -> str:
        """The name of the file of weights, without its suffix."""
        return ADAPTERS if self.adapters else MODEL

    def held(self) -> list[LocalShard]:
        """Return what this rank holds of the model's tensors."""
        return local_shards(
            self.engine.module, self.engine.optimizer, self.groups, rename=self.rename, trained_only=self.adapters
        )

    def require_savable(self) -> list[str]:
        """Return the names of what the optimizer keeps for each weight; all ranks call it.

        Raises:
            UserError: a checkpoint would lack values of the model or of the optimizer, or no file can hold them.
        """
        with states_in_memory(self.engine.optimizer):
            held = self.held()
            found = _templates(self.engine.optimizer, held)
            require_each_value_once(held, self.groups)
            all_or_none(lambda: require_storable(map(entry_of, held)))
        return _kinds(found.values())

    def stored(self, progress: TrainingProgress) -> tuple[list[tuple[str, list[LocalShard]]], TrainingProgress]:
        """Return what this rank holds of each file's tensors, and `progress` with the engine's counters added.

        All ranks call it. What lies on NVMe is copied into memory.
        """
        optimizer = self.engine.optimizer
        with states_in_memory(optimizer):
            held = self.held()
            kept = _templates(optimizer, held)
            found: dict[str, Counter] = {}
            for each, _ in _stepped(held):
                found.update(counted(optimizer, each, kept[each.param_group, each.tensor.dim()]))
            counters = dict(zip(found, numbers(list(found.values())), strict=True))
            own = [name for name in _kinds(kept.values()) if _of_state(optimizer, held, name)]
            # a stage may hold nothing that is trained: every rank must still take part in every file
            of_all = values_of_all((own, counters))
            names = sorted({name for found, _ in of_all for name in found})
            files = [(self.stem, held), *((name, _of_state(optimizer, held, name)) for name in names)]
            return files, replace(
                progress,
                skipped_steps=self.engine.skipped_steps,
                optimizer_states=names,
                counters={name: value for _, found in of_all for name, value in found.items()},
                loss_scaling=loss_scaling(optimizer),
            )

    def load(self, checkpoint: Path) -> TrainingProgress:
        """Load a checkpoint into the engine; all ranks call it.

        The groups of parameters and the schedule of the learning rate are left as they were built.

        Raises:
            UserError: on all ranks alike: the saved model is another one, or a rank cannot read.
        """
        progress = all_or_none(lambda: read_progress(checkpoint))
        listed = all_or_none(lambda: read_manifest(checkpoint).files)

        def fill(stem: str, held: Sequence[LocalShard]) -> None:
            stored = open_whole_tensors(checkpoint, stem, listed, {each.name for each in held})
            require_stored(checkpoint, stored, held)
            all_or_none(lambda: read_tensors(stored, held))

        self.restore(progress, fill)
        return progress

    def restore(self, progress: TrainingProgress, fill: Callable[[str, Sequence[LocalShard]], None]) -> None:
        """Bring the engine to where `progress` says that a run stood; all ranks call it.

        Args:
            fill: called with the stem of a checkpoint's file and what this rank holds of its tensors; all ranks call it
                in the same order.
        """
        optimizer = self.engine.optimizer
        with states_in_memory(optimizer, changed=True):
            held = self.held()
            fill(self.stem, held)
            if progress.optimizer_states:
                # before its first step an optimizer keeps nothing: its state is made as that step would make it
                found = _templates(optimizer, held)
                for each in {id(each.tensor): each for each, _ in _stepped(held)}.values():
                    make_state(optimizer, each, found[each.param_group, each.tensor.dim()], progress.counters)
                for name in progress.optimizer_states:
                    fill(name, _of_state(optimizer, held, name))
            else:  # an engine that has made steps begins anew
                for each, _ in _stepped(held):
                    torch_optimizer(optimizer).state.pop(each.tensor, None)
            use_stepped_on(optimizer)
        set_counters(self.engine, progress.step, progress.skipped_steps)
        set_loss_scaling(optimizer, progress.loss_scaling)


def _templates(optimizer: EngineOptimizer, held: Sequence[LocalShard]) -> dict[tuple[int, int], Template]:
    """Return what the optimizer keeps, by parameter group and by the number of dimensions of what it steps on."""
    found: dict[tuple[int, int], Template] = {}
    for each, _ in _stepped(held):
        key = each.param_group, each.tensor.dim()
        if key not in found:
            found[key] = template(optimizer, each)
    return found


def _kinds(templates: Iterable[Template]) -> list[str]:
    """Return the names of what is kept for each weight (`exp_avg`), each a file of a checkpoint."""
    return sorted({name for found in templates for name in found.elements})


def _of_state(optimizer: EngineOptimizer, held: Sequence[LocalShard], name: str) -> list[LocalShard]:
    """Return what this rank holds of the values `name` of the optimizer."""
    state = torch_optimizer(optimizer).state
    found = ((each, state.get(each.stepped[0].tensor, {}).get(name)) for each in held if each.stepped is not None)
    return [each.of_state(values) for each, values in found if values is not None]


def _stepped(held: Sequence[LocalShard]) -> list[tuple[SteppedOn, Run]]:
    """Return the tensors that the optimizer steps on, with the run of each that a tensor of the model is."""
    return [each.stepped for each in held if each.stepped is not None]


def residue_file(checkpoint: Path) -> Path:
    """Return where this rank's residue lies in a checkpoint."""
    return checkpoint / f"gradient_residue-{dist.get_rank():05d}.safetensors"


def write_residue(folder: Path, tensors: dict[str, Tensor], description: str) -> None:
    """Write a copy of a reduction's state; UserError if that fails, as on a full disk."""
    path = residue_file(folder)
    try:
        save_file(tensors, path, metadata={"describes": description})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from error


def load_residue(reduction: CompressedReduction | None, checkpoint: Path, layout: str, listed: Container[str]) -> bool:
    """Go on with the residues in a checkpoint, or without any where they are of another layout; all ranks call it.

    Args:
        listed: the files of the checkpoint; any other is not read.

    Returns:
        Whether the residues of all ranks are used, or none are needed.
    """

    def read() -> dict[str, Tensor] | None:
        path = residue_file(checkpoint)
        if reduction is None or path.name not in listed:
            return None
        return _read_residue(path, describe(reduction, layout))

    found = all_or_none(read)
    whole = all(values_of_all(reduction is None or found is not None))
    if reduction is not None and whole and found is not None:
        reduction.set_state(found)
    elif reduction is not None:
        reduction.reset()
    return whole


def describe(reduction: CompressedReduction, layout: str) -> str:
    """Return a text that is the same for reductions that can go on from each other's residue."""
    parts = list(reduction.sizes), list(reduction.kinds), [bucket.size for bucket in reduction.buckets]
    placed = hashlib.sha256(str(parts).encode()).hexdigest()
    return f"{layout}, rank {dist.get_rank()}, {reduction.bits} bits, {placed}"


def _read_residue(path: Path, description: str) -> dict[str, Tensor] | None:
    """Return the tensors of a file, None if it does not fit; UserError if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("describes") != description:
                return None
            found: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return found


def first_unchanged(checkpoint: Path | None, output_dir: Path, *, auto: bool) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint with unchanged files, and what is wrong with the newer ones; all ranks call it.

    Begins with `checkpoint` and, with `auto`, goes on to older ones of `output_dir`.

    Raises:
        UserError: without `auto`, on all ranks alike: a file of `checkpoint` is not what was saved.
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
        older = newest_whole(output_dir, before=checkpoint) if dist.get_rank() == 0 else None
        checkpoint = value_of_first(older)
    return checkpoint, left_out
