"""Write the trained model as a HuggingFace directory.

Every rank writes what it holds to its place in the files, so no rank ever holds the whole model or, but for ZeRO-3,
a whole tensor. Names and files are those of the checkpoint that was read, the same in every layout. A directory that is
shared by all hosts is assumed, as for checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig

from harness.checkpoint.atomic import replaced_files
from harness.checkpoint.exporting.gather import gather_tp, gather_zero3
from harness.checkpoint.exporting.model_files import replace_model, settle_model, unfinished_name
from harness.checkpoint.file_plan import Share, dealt_places, plan_files
from harness.checkpoint.tensor_writer import Entry, OpenFiles, Place, create, index_content, places_in
from harness.deepspeed.zero3_parameters import unpartitioned_shape
from harness.hf.skeleton import ModelSource
from harness.hf.weights.conversion import CheckpointFormat, ParameterRef
from harness.hf.weights.lazy_tensor import Computed, InMemory, LazyTensor, realised
from harness.hf.weights.slices import TensorSlice
from harness.parallel.tensor.shard import Shard, shard_of
from harness.topology.groups import Groups


def export_weights(
    module: nn.Module, groups: Groups, directory: Path, *, rename: Callable[[str], str], form: CheckpointFormat | None
) -> None:
    """Write the model's tensors as safetensors; all ranks call it.

    Args:
        module: this rank's layers.
        rename: the name in `form` of a tensor of `module`.
        form: the tensors to write and their files; None: those of all stages, as they are.

    Raises:
        UserError: a tensor would have to be made of values of several stages, or there is no room for the files.
    """
    local = {rename(name): tensor for name, tensor in _saved_tensors(module, each_name=form is not None)}
    if form is None:
        form = CheckpointFormat(
            tensors={name: LazyTensor.of(ParameterRef(name, _shape(t), t.dtype)) for name, t in local.items()}
        )
    mine = {name: lazy for name, lazy in form.tensors.items() if _held(lazy) <= local.keys()}
    files: dict[str, list[Entry]] = {}  # on rank 0 alone

    def plan(shares: list[Share]) -> dict[str, Place]:
        files.update(plan_files(shares, form))
        return _create_files(directory, files)

    places = dealt_places(_entries(mine, local), groups, plan)
    with OpenFiles() as opened:
        _write_patches(local, mine, places, groups, opened)
        _write_computed(local, mine, places, groups, opened)
    dist.barrier()
    if groups.rank == 0:
        replace_model(directory, list(files), index_content(files))
    dist.barrier()


def export_config(source: ModelSource, dtype: torch.dtype, directory: Path) -> None:
    """Write config.json and generation_config.json; called by one rank."""
    config = copy.deepcopy(source.config)
    config.dtype = dtype
    with replaced_files(directory) as folder:
        config.save_pretrained(folder)
        (source.generation or GenerationConfig.from_model_config(config)).save_pretrained(folder)


# -- what is written where -----------------------------------------------------------------------------------


def _saved_tensors(module: nn.Module, each_name: bool) -> Iterator[tuple[str, Tensor]]:
    """Parameters, a tied one under its first name or each, and buffers that are saved; in one order on all ranks."""
    persistent = set(module.state_dict(keep_vars=True))
    yield from module.named_parameters(remove_duplicate=not each_name)
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor of which a rank may hold a part."""
    shard = shard_of(tensor)
    return shard.full_shape if shard is not None else unpartitioned_shape(tensor)


def _held(lazy: LazyTensor) -> set[str]:
    return {leaf.name for leaf in lazy.leaves() if isinstance(leaf, ParameterRef)}


def _entries(mine: Mapping[str, LazyTensor], local: Mapping[str, Tensor]) -> list[Entry]:
    """Return what this rank's stage writes: the tensors all of whose values it holds."""
    entries = []
    for name, lazy in mine.items():
        source = local[min(_held(lazy))]
        trained = isinstance(source, nn.Parameter)
        entries.append(Entry(name=name, shape=tuple(lazy.shape), dtype=source.dtype, trained=trained))
    return entries


def _create_files(directory: Path, files: Mapping[str, list[Entry]]) -> dict[str, Place]:
    """Make the files at their full size, under their unfinished names; return where each tensor goes."""
    settle_model(directory)
    laid_out = {name: places_in(directory / unfinished_name(name), entries) for name, entries in files.items()}
    for header, places in laid_out.values():
        create(places[0].path, header, places)
    return {place.entry.name: place for _, places in laid_out.values() for place in places}


# -- writing -------------------------------------------------------------------------------------------------


def _write_patches(
    local: Mapping[str, Tensor],
    mine: Mapping[str, LazyTensor],
    places: Mapping[str, Place],
    groups: Groups,
    opened: OpenFiles,
) -> None:
    """Write what is but an arrangement of this rank's tensors, one of them after the other."""
    uses: dict[str, list[tuple[Place, TensorSlice]]] = {name: [] for name in local}
    for name, lazy in mine.items():
        for patch in lazy.patches:
            if isinstance(patch.leaf, ParameterRef):
                uses[patch.leaf.name].append((places[name], patch))
    for name, tensor in local.items():
        if not uses[name]:
            continue
        with gather_zero3([tensor]):
            if _writes(tensor, groups):
                for place, patch in uses[name]:
                    for part, values in _parts(patch, tensor):
                        opened.write(place, part.start, part.lazy_view(values))


def _parts(patch: TensorSlice, tensor: Tensor) -> Iterator[tuple[TensorSlice, Tensor]]:
    """Return the part of a slice that lies in this rank's tensor, with its values."""
    shard = shard_of(tensor) or _all_of(tensor)
    tensor = tensor.detach()
    for start, stop, offset in shard.spans():
        part = patch.clipped(shard.dim, start, stop) if tensor.dim() else patch
        if part is not None:
            box = [slice(*span) for span in part.box]
            if box:
                first, last = part.box[shard.dim]
                box[shard.dim] = slice(first - start + offset, last - start + offset)
            yield part, tensor[tuple(box)]


def _all_of(tensor: Tensor) -> Shard:
    size = tensor.shape[0] if tensor.dim() else 1
    return Shard(full_shape=tuple(tensor.shape), dim=0, pieces=((0, size),))


def _write_computed(
    local: Mapping[str, Tensor],
    mine: Mapping[str, LazyTensor],
    places: Mapping[str, Place],
    groups: Groups,
    opened: OpenFiles,
) -> None:
    """Write what must be computed from whole tensors, which the first rank of the tensor-parallel group then holds."""
    for name, lazy in mine.items():
        patches = [patch for patch in lazy.patches if isinstance(patch.leaf, Computed)]
        if not patches:
            continue
        needed = sorted(_held(lazy))
        with gather_zero3([local[source] for source in needed]):
            whole = {source: InMemory(gather_tp(local[source], groups).cpu()) for source in needed}
            if groups.coordinate.dp_rank == 0 and groups.coordinate.tp_rank == 0:
                values = realised(lazy.with_leaves(whole.__getitem__))
                opened.write(places[name], (0,) * values.dim(), values.to(places[name].entry.dtype))


def _writes(tensor: Tensor, groups: Groups) -> bool:
    """Whether this rank writes its part of a tensor: of several ranks that hold the same, the first does."""
    shard = shard_of(tensor)
    owner = groups.coordinate.tp_rank == 0 if shard is None else shard.owner
    return owner and groups.coordinate.dp_rank == 0
