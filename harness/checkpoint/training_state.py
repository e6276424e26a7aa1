"""Extract the training state from an engine, and restore it: weights, optimizer states, counters.

A checkpoint does not depend on the layout. `model.safetensors` holds the weights under HuggingFace's names, in float32
as the optimizer updates them. Each kind of optimizer state, such as `exp_avg`, is one more file with the same names.
`state.json` holds the rest. Random numbers need no state: they are functions of seed, step and position
(`harness/parallel/dropout.py`).

Only the residue belongs to a rank: the accumulated rounding error of compressed gradients. A run in the same layout
loads it and continues bit for bit; a run in another layout begins without it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from harness.checkpoint.directories import ADAPTERS, MODEL, TrainingProgress, read_manifest, read_progress
from harness.checkpoint.integrity import changed_file, damage, newest_whole, wait_until_seen
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
from harness.deepspeed.flat_tensors import EngineOptimizer, ParameterSlice, UpdatedTensor
from harness.deepspeed.optimizer_states import (
    Counter,
    StateTemplate,
    copy_to_model_parameters,
    counters_of,
    make_state,
    states_in_memory,
    stored_names,
    template,
    torch_optimizer,
)
from harness.deepspeed.update import Compression
from harness.errors import UserError
from harness.parallel.host import numbers
from harness.topology.agreement import all_gather_object, all_or_none, broadcast_object
from harness.topology.groups import Groups


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """The saved part of an engine.

    Attributes:
        rename: maps a tensor's name in the engine's module to its name in a checkpoint.
        adapters: whether only adapters are trained; the frozen base weights are not saved.
        compression: the compressed reduction of gradients; None without compression.
        one_host: whether all ranks are on one host, so that they see each other's writes before these are on disk.
    """

    engine: DeepSpeedEngine
    groups: Groups
    rename: Callable[[str], str]
    adapters: bool
    compression: Compression | None = None
    one_host: bool = False

    @property
    def stem(self) -> str:
        """The name of the weight file without suffix."""
        return ADAPTERS if self.adapters else MODEL

    def held(self) -> list[LocalShard]:
        """Return this rank's shards of the model's tensors."""
        return local_shards(
            self.engine.module, self.engine.optimizer, self.groups, rename=self.rename, trained_only=self.adapters
        )

    def require_savable(self) -> list[str]:
        """Check that a checkpoint can be saved; return the names of the optimizer states. All ranks call it.

        Raises UserError if it would lack values of the model or the optimizer, or if safetensors cannot store them.
        """
        with states_in_memory(self.engine.optimizer):
            held = self.held()
            found = _templates(self.engine.optimizer, held)
            require_each_value_once(held, self.groups)
            all_or_none(lambda: require_storable(map(entry_of, held)))
        return sorted(_kinds(self.engine.optimizer, found.values()))

    def stored(self, progress: TrainingProgress) -> tuple[list[tuple[str, list[LocalShard]]], TrainingProgress]:
        """Return (file, this rank's shards) for each file, and `progress` with the engine's counters.

        All ranks call it. States that ZeRO-Infinity keeps on NVMe are copied into memory.
        """
        optimizer = self.engine.optimizer
        with states_in_memory(optimizer):
            held = self.held()
            kept = _templates(optimizer, held)
            found: dict[str, Counter] = {}
            for each, _ in _updated(held):
                found.update(counters_of(optimizer, each, kept[each.param_group, each.tensor.dim()]))
            counters = dict(zip(found, numbers(list(found.values())), strict=True))
            kinds = _kinds(optimizer, kept.values())
            own = [name for name in kinds if _of_state(optimizer, held, kinds[name])]
            # A stage with only frozen layers must still take part in every file, because writing is collective.
            of_all = all_gather_object((own, counters))
            # Sorted, so that all ranks write the files in one order.
            names = sorted({name for found, _ in of_all for name in found})
            files = [(self.stem, held), *((name, _of_state(optimizer, held, kinds.get(name))) for name in names)]
            return files, replace(
                progress,
                skipped_steps=self.engine.skipped_steps,
                optimizer_states=names,
                counters={name: value for _, found in of_all for name, value in found.items()},
                loss_scaling=loss_scaling(optimizer),
            )

    def load(self, checkpoint: Path) -> TrainingProgress:
        """Load a checkpoint into the engine; all ranks call it. Parameter groups and the schedule stay as built.

        Raises UserError on all ranks if the saved model has other tensors, or a rank cannot read a file.
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
        """Restore the engine's weights, optimizer states and counters; all ranks call it.

        Args:
            fill: fills this rank's shards of the tensors in a file, given by its stem; called on all ranks in the same
                order.
        """
        optimizer = self.engine.optimizer
        with states_in_memory(optimizer, changed=True):
            held = self.held()
            fill(self.stem, held)
            found = _templates(optimizer, held)
            kinds = _kinds(optimizer, found.values())
            if progress.optimizer_states:
                # torch creates optimizer states at the first step. Create them here, as that step would: once for each
                # tensor that is updated, which under ZeRO holds many parameters.
                for each in {id(each.tensor): each for each, _ in _updated(held)}.values():
                    make_state(optimizer, each, found[each.param_group, each.tensor.dim()], progress.counters)
                _require_taken(progress.optimizer_states, kinds)
                for name in progress.optimizer_states:
                    fill(name, _of_state(optimizer, held, kinds.get(name)))
            else:
                # The checkpoint is from before the first step: the engine's own states, of later steps, must not act.
                for each, _ in _updated(held):
                    torch_optimizer(optimizer).state.pop(each.tensor, None)
            # The model computes with parameters of its own dtype, not with the float32 values that were loaded.
            copy_to_model_parameters(optimizer)
        set_counters(self.engine, progress.step, progress.skipped_steps)
        set_loss_scaling(optimizer, progress.loss_scaling)


def _templates(optimizer: EngineOptimizer, held: Sequence[LocalShard]) -> dict[tuple[int, int], StateTemplate]:
    """Return the optimizer's states, by (parameter group, number of dimensions of the updated tensor)."""
    found: dict[tuple[int, int], StateTemplate] = {}
    for each, _ in _updated(held):
        # By dimensions too, because an optimizer may treat matrices differently.
        key = each.param_group, each.tensor.dim()
        if key not in found:
            found[key] = template(optimizer, each)
    return found


def _kinds(optimizer: EngineOptimizer, templates: Iterable[StateTemplate]) -> dict[str, str]:
    """Return checkpoint name -> optimizer's name of each state with one value per weight (`exp_avg`)."""
    return {name: own for found in templates for name, own in stored_names(optimizer, found).items()}


def _require_taken(stored: Iterable[str], kinds: Iterable[str]) -> None:
    """Raise UserError on all ranks if no optimizer keeps a stored state, which would silently be lost."""
    taken = {name for names in all_gather_object(list(kinds)) for name in names}
    if lost := sorted(set(stored) - taken):
        kept = " and ".join(sorted(taken)) or "none"
        raise UserError(f"the checkpoint has the optimizer state {lost[0]}, but this optimizer keeps {kept}")


def _of_state(optimizer: EngineOptimizer, held: Sequence[LocalShard], own: str | None) -> list[LocalShard]:
    """Return this rank's shards of the optimizer state `own`; empty if the optimizer has no such state."""
    state = torch_optimizer(optimizer).state
    found = ((each, state.get(each.updated[0].tensor, {}).get(own)) for each in held if each.updated is not None)
    return [each.of_state(values) for each, values in found if values is not None]


def _updated(held: Sequence[LocalShard]) -> list[tuple[UpdatedTensor, ParameterSlice]]:
    """Return, for each trained tensor, the tensor that the optimizer updates and the element range in it."""
    return [each.updated for each in held if each.updated is not None]


def residue_file(checkpoint: Path) -> Path:
    return checkpoint / f"gradient_residue-{dist.get_rank():05d}.safetensors"


def write_residue(folder: Path, tensors: dict[str, Tensor], description: str) -> None:
    """Write a reduction's state, tensors by name; a run with the same `description` may continue from it.

    Raises UserError if the file cannot be written.
    """
    path = residue_file(folder)
    try:
        save_file(tensors, path, metadata={"describes": description})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from error


def load_residue(reduction: Compression | None, checkpoint: Path, layout: str, listed: Container[str]) -> bool:
    """Load a checkpoint's residues, or reset them if they do not fit this run; all ranks call it.

    Args:
        listed: the files in the checkpoint's manifest; other files are not read.

    Returns:
        Whether the residues of all ranks were loaded, or none are needed.
    """

    def read() -> dict[str, Tensor] | None:
        path = residue_file(checkpoint)
        if reduction is None or path.name not in listed:
            return None
        return _read_residue(path, describe(reduction, layout))

    found = all_or_none(read)
    # The residues of all ranks belong together: all are loaded, or none.
    whole = all(all_gather_object(reduction is None or found is not None))
    if reduction is not None and whole and found is not None:
        reduction.set_state(found)
    elif reduction is not None:
        reduction.reset()
    return whole


def describe(reduction: Compression, layout: str) -> str:
    """Return a text that is equal for two reductions if one can continue from the other's residue."""
    return f"{layout}, rank {dist.get_rank()}, {reduction.description}"


def _read_residue(path: Path, description: str) -> dict[str, Tensor] | None:
    """Return a file's tensors; None if its description differs. Raises UserError if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("describes") != description:
                return None
            found: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return found


def damage_on_any(checkpoint: Path) -> str | None:
    """Check sizes and checksums of the checkpoint that rank 0 chose. Returns the first problem, or None.

    All ranks call it. A host waits if it does not see the checkpoint yet, although rank 0 does.
    """
    if (found := broadcast_object(damage(checkpoint))) is not None:
        return found
    try:
        wait_until_seen(checkpoint, socket.gethostname())
        found = changed_file(checkpoint, dist.get_rank(), dist.get_world_size())
    except UserError as error:
        found = str(error)
    return next(filter(None, all_gather_object(found)), None)


def first_unchanged(checkpoint: Path | None, output_dir: Path, *, auto: bool) -> tuple[Path | None, list[str]]:
    """Verify the checksums of `checkpoint`; with `auto`, try older ones in `output_dir` until one is unchanged.

    All ranks call it.

    Returns:
        The unchanged checkpoint (or None), and one line for each damaged one.

    Raises:
        UserError: on all ranks, if a file of `checkpoint` has changed and `auto` is not set.
    """
    left_out: list[str] = []
    while checkpoint is not None:
        reason = damage_on_any(checkpoint)
        if reason is None:
            break
        left_out.append(f"{checkpoint} is damaged ({reason})")
        if not auto:
            raise UserError(f"{left_out[0]}: resume from another checkpoint")
        # Rank 0 chooses for all: over NFS, other hosts may not see the same folders yet.
        older = newest_whole(output_dir, before=checkpoint) if dist.get_rank() == 0 else None
        checkpoint = broadcast_object(older)
    return checkpoint, left_out
