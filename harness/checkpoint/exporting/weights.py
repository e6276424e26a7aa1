"""Write the trained model as a HuggingFace directory, or its adapters as peft stores them.

Every rank writes its shards directly to their offsets in the files. So no rank holds the whole model, nor a whole
tensor unless it is computed from others. In every layout, names and files match the checkpoint that was read. All hosts
must share the directory, as for checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from harness.atomic import UNFINISHED, replaced_files, sync_file, sync_folder
from harness.checkpoint.exporting.model_files import hide_secrets, replace_model, settle_model, unfinished_name
from harness.checkpoint.exporting.plan_files import plan_files
from harness.checkpoint.tensors.local_shard import local_shard_of, saved_tensors
from harness.checkpoint.tensors.not_saved import all_save, saving
from harness.checkpoint.tensors.tensor_writer import Entry, FileRegion, OpenFiles, create, file_regions, index_content
from harness.checkpoint.tensors.whole_tensors import StageTensors, dealt_regions, several_hosts, write_tensors
from harness.deepspeed.zero3_parameters import is_partitioned, unpartitioned_size
from harness.errors import UserError
from harness.hf.skeleton import ModelSource
from harness.hf.weights.conversion import CheckpointFormat, ParameterRef
from harness.hf.weights.lazy_tensor import Box, Computed, InMemory, LazyTensor, TensorSlice, realised
from harness.parallel.host import brought_to_host
from harness.parallel.memory import malloc_trim
from harness.parallel.tensor.shard import Shard, shard_of
from harness.topology.agreement import all_gather_object
from harness.topology.groups import Groups

MANY = 100_000  # values; with fewer, it is not worth a call to return freed memory to the system
STEM = "adapter_model"
FILE = f"{STEM}.safetensors"


def gather_zero3(tensors: Sequence[Tensor]) -> ExitStack:
    """Return a context in which the tensors partitioned by ZeRO-3 are gathered; all ranks enter it."""
    stack = ExitStack()
    spread = [tensor for tensor in tensors if is_partitioned(tensor)]
    if spread:
        if unpartitioned_size(spread) >= MANY:
            stack.callback(malloc_trim)
        stack.enter_context(deepspeed.zero.GatheredParameters(spread))
    return stack


def gather_tp(local: Tensor, groups: Groups) -> Tensor:
    """Gather a tensor on the first tensor-parallel rank; all ranks of the group call it.

    Returns:
        The whole tensor [full shape] on that rank, the local shard on others. Experts are whole on every rank.
    """
    shard = shard_of(local)
    local = local.detach()
    if shard is not None and shard.over_data:
        return _gather_experts(local, shard, groups)
    if shard is None or groups.tp_group is None:
        return local
    ranks = dist.get_process_group_ranks(groups.tp_group)
    first = groups.rank == ranks[0]
    shards = all_gather_object(shard, groups.tp_group)
    sizes = [prod(piece.local_shape) for piece in shards]
    flat = functional.pad(local.flatten(), (0, max(sizes) - local.numel()))  # gather needs equal sizes on all ranks
    parts = [torch.empty_like(flat) for _ in ranks] if first else None
    dist.gather(flat, parts, dst=ranks[0], group=groups.tp_group)
    if parts is None:
        return local
    whole = local.new_empty(shard.full_shape)
    for part, piece, size in zip(parts, shards, sizes, strict=True):
        piece.put(part[:size].view(piece.local_shape), whole)
    return whole


def _gather_experts(local: Tensor, shard: Shard, groups: Groups) -> Tensor:
    """Gather a tensor of experts distributed over data-parallel ranks; all ranks of a stage call it."""
    whole = local.new_zeros(shard.full_shape)
    shard.put(local, whole)
    for group in (groups.ep_group, groups.tp_group):
        if group is not None:
            dist.all_reduce(whole, group=group)  # each value comes from one rank, so the sum is exact
    return whole


def export_weights(
    module: nn.Module, groups: Groups, directory: Path, *, rename: Callable[[str], str], form: CheckpointFormat | None
) -> None:
    """Write the model's tensors as safetensors; all ranks call it.

    Args:
        module: this rank's layers.
        rename: maps a tensor's name in `module` to its name in `form`.
        form: the tensors to write and their files; None for the tensors of all stages under their own names.

    Raises:
        UserError: on all ranks, if a tensor combines values of several stages.
        NotSaved: on all ranks, if the disk is full or a file cannot be written.
    """
    local = {rename(name): tensor for name, tensor in saved_tensors(module, each_name=form is not None)}
    if form is None:
        held = {name: local_shard_of(name, tensor, groups) for name, tensor in local.items()}
        form = CheckpointFormat(
            tensors={n: LazyTensor.of(ParameterRef(n, h.full_shape, h.values.dtype)) for n, h in held.items()}
        )
    mine = {name: lazy for name, lazy in form.tensors.items() if _held(lazy) <= local.keys()}
    files: dict[str, list[Entry]] = {}  # on rank 0 alone

    def plan(stages: list[StageTensors]) -> dict[str, FileRegion]:
        files.update(plan_files(stages, form))
        return _create_files(directory, files)

    regions = dealt_regions(_entries(mine, local), groups, plan)
    with OpenFiles(several_hosts=several_hosts()) as opened:
        export = _Export(local=local, mine=mine, regions=regions, groups=groups, opened=opened)
        export.write_patches()
        export.write_computed()
        export.sync()
    all_save(export.require_written)
    all_save(lambda: replace_model(directory, list(files), index_content(files)) if groups.rank == 0 else None)


def export_config(source: ModelSource, dtype: torch.dtype, directory: Path) -> None:
    """Write config.json and generation_config.json; one rank calls it. Raises OSError if that fails."""
    config = copy.deepcopy(source.config)
    config.dtype = dtype
    with replaced_files(directory) as folder:
        _save(config, folder / CONFIG_NAME)
        _save(source.generation or GenerationConfig.from_model_config(config), folder / GENERATION_CONFIG_NAME)
        hide_secrets(folder)


def _save(config: PretrainedConfig | GenerationConfig, path: Path) -> None:
    """Save a config even if transformers refuses to, since it can read it, and weights must not be lost."""
    try:
        config.save_pretrained(path.parent)
    except ValueError:  # a generation option without effect, like a temperature without do_sample
        config.to_json_file(path)


# -- what is written where -----------------------------------------------------------------------------------


def _held(lazy: LazyTensor) -> set[str]:
    return {leaf.name for leaf in lazy.leaves() if isinstance(leaf, ParameterRef)}


def _entries(mine: Mapping[str, LazyTensor], local: Mapping[str, Tensor]) -> list[Entry]:
    """Return the tensors that this rank's stage writes, which use only values of this stage."""
    entries = []
    for name, lazy in mine.items():
        source = local[min(_held(lazy))]
        trained = isinstance(source, nn.Parameter)
        entries.append(Entry(name=name, shape=tuple(lazy.shape), dtype=source.dtype, trained=trained))
    return entries


def _create_files(directory: Path, files: Mapping[str, list[Entry]]) -> dict[str, FileRegion]:
    """Create the files at full size under their unfinished names; return the region of each tensor."""
    settle_model(directory)
    laid_out = {name: file_regions(directory / unfinished_name(name), entries) for name, entries in files.items()}
    for header, regions in laid_out.values():
        create(regions[0].path, header, regions)
    return {region.entry.name: region for _, regions in laid_out.values() for region in regions}


# -- writing -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Export:
    """The part of an export that one rank writes.

    Attributes:
        local: this rank's tensors, by their names in the form.
        mine: the tensors that this rank's stage writes, computed from `local`.
        regions: file and offset of each of them.
        failed: errors of this rank, raised at the end because the other ranks need this one in collectives.
    """

    local: Mapping[str, Tensor]
    mine: Mapping[str, LazyTensor]
    regions: Mapping[str, FileRegion]
    groups: Groups
    opened: OpenFiles
    failed: list[UserError | OSError] = field(default_factory=list)

    def require_written(self) -> None:
        """Raise this rank's first error, if any."""
        if self.failed:
            raise self.failed[0]

    def sync(self) -> None:
        """Wait for the disk; without reserved blocks, a full disk may be reported only now."""
        self._attempt(self.opened.sync)

    def _write(self, region: FileRegion, start: Sequence[int], values: Tensor) -> None:
        self._attempt(lambda: self.opened.write(region, start, values))

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            saving(action)
        except (UserError, OSError) as error:
            self.failed.append(error)

    def write_patches(self) -> None:
        """Write the tensors that only rearrange values (split, join, transpose); each rank writes its shards."""
        # For each tensor of this rank, the slices of file tensors made from it: several for a tied weight, or for a
        # weight that the file stores in several tensors.
        uses: dict[str, list[tuple[FileRegion, TensorSlice]]] = {name: [] for name in self.local}
        for name, lazy in self.mine.items():
            for patch in lazy.patches:
                if isinstance(patch.leaf, ParameterRef):
                    uses[patch.leaf.name].append((self.regions[name], patch))
        shards = (local_shard_of(name, tensor, self.groups) for name, tensor in self.local.items() if uses[name])
        for held, copied in brought_to_host((held, held.values) for held in shards if held.owned):
            for box, values in replace(held, values=copied).pieces():
                for region, patch in uses[held.name]:
                    part = _within(patch, box)
                    if part is not None:
                        self._write(region, part.start, _lazy_view(part, values[_index(part.box, box)]))

    def write_computed(self) -> None:
        """Write the tensors computed from whole tensors; the first tensor-parallel rank gathers and writes."""
        for name, lazy in self.mine.items():
            patches = [patch for patch in lazy.patches if isinstance(patch.leaf, Computed)]
            if not patches:
                continue
            needed = sorted(_held(lazy))
            with gather_zero3([self.local[source] for source in needed]):
                whole = {source: InMemory(gather_tp(self.local[source], self.groups).cpu()) for source in needed}
                if self.groups.coordinate.dp_rank == 0 and self.groups.coordinate.tp_rank == 0:
                    values = realised(lazy.with_leaves(whole.__getitem__))
                    self._write(self.regions[name], (0,) * values.dim(), values.to(self.regions[name].entry.dtype))


def _lazy_view(patch: TensorSlice, values: Tensor) -> Tensor:
    """Return `values`, of the slice's box of the leaf, with dimensions in the lazy tensor's order."""
    for missing in (axis for axis in reversed(range(len(patch.box))) if axis not in patch.axes):
        values = values.squeeze(missing)
    kept = [axis for axis in patch.axes if axis is not None]
    values = values.permute([sorted(kept).index(axis) for axis in kept])
    for dim, axis in enumerate(patch.axes):
        if axis is None:
            values = values.unsqueeze(dim)
    return values


def _within(patch: TensorSlice, box: Box) -> TensorSlice | None:
    """Return the part of a slice inside a box of its source tensor; None if they do not overlap."""
    part: TensorSlice | None = patch
    for axis, (start, stop) in enumerate(box):
        part = part.clipped(axis, start, stop) if part is not None else None
    return part


def _index(part: Box, box: Box) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(part, box, strict=True))


def export_adapters(module: nn.Module, groups: Groups, directory: Path, *, rename: Callable[[str], str]) -> None:
    """Write all trained parameters into `adapter_model.safetensors`; all ranks call it.

    Args:
        module: this rank's layers.
        rename: maps a parameter's name in `module` to its name in the file.

    Raises:
        NotSaved: on all ranks, if the file cannot be written.
    """
    trained = [each for each in module.named_parameters(remove_duplicate=False) if each[1].requires_grad]
    unfinished = UNFINISHED + STEM
    write_tensors(
        directory, unfinished, [local_shard_of(rename(n), p, groups) for n, p in trained], groups, one_file=True
    )

    def replace() -> None:
        written = directory / f"{unfinished}.safetensors"
        sync_file(written)
        written.replace(directory / FILE)
        sync_folder(directory)

    all_save(replace if groups.rank == 0 else lambda: None)
