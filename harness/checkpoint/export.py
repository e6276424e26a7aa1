"""Write the trained model as a HuggingFace directory.

Each pipeline stage writes its own safetensors, layer by layer, from shards gathered tensor by tensor; rank 0 adds the
index and the config. No rank ever holds the whole model. A directory that is shared by all hosts is assumed, as for
checkpoints.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from harness.models.skeleton import ModelSource
from harness.parallel.shard import Shard, shard_of
from harness.topology.groups import Groups

MAX_FILE_BYTES = 5 * 10**9
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def export_weights(
    module: nn.Module, groups: Groups, directory: Path, *, rename: Callable[[str], str], left_out: Set[str]
) -> None:
    """Write the model's tensors as safetensors; all ranks call it.

    Args:
        module: this rank's layers.
        rename: the name that is written for a parameter of `module`.
        left_out: written names that are not stored, as they are tied to another.
    """
    place = groups.coordinate
    writes = place.data == 0 and place.tensor == 0
    files: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        name = _partial_name(place.stage, len(files))
        save_file(pending, directory / name, metadata={"format": "pt"})
        files.append({key: tensor.nbytes for key, tensor in pending.items()})
        pending.clear()

    for key, tensor in whole_tensors(module, groups, writes):
        name = rename(key)
        if tensor is None or name in left_out:
            continue
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > MAX_FILE_BYTES:
            flush()
        pending[name] = tensor
    if pending:
        flush()
    written = _gather(place.stage, files if writes else [])
    if groups.rank == 0:
        _name_files(directory, written)
    dist.barrier()


def export_config(source: ModelSource, dtype: torch.dtype, directory: Path) -> None:
    """Write config.json and generation_config.json; called by one rank."""
    config = copy.deepcopy(source.config)
    config.dtype = dtype
    config.save_pretrained(directory)
    (source.generation or GenerationConfig.from_model_config(config)).save_pretrained(directory)


def whole_tensors(
    module: nn.Module, groups: Groups, writes: bool, *, trained: bool = False
) -> Iterator[tuple[str, Tensor | None]]:
    """Name and whole tensor of all parameters and buffers to be saved (with `trained`, of trained parameters alone);
    None where this rank does not write.

    All ranks of a data and of a tensor group iterate together.
    """
    persistent = set() if trained else set(module.state_dict(keep_vars=True))
    for name, parameter in module.named_parameters():
        if trained and not parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter]) if hasattr(parameter, "ds_id") else nullcontext():
            whole = _join(parameter.detach(), shard_of(parameter), groups)
            yield name, whole.cpu().contiguous().clone() if writes else None
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer.detach().cpu().clone() if writes else None


def _join(local: Tensor, shard: Shard | None, groups: Groups) -> Tensor:
    """The whole tensor, on the first rank of the tensor-parallel group (elsewhere the shard)."""
    if shard is None or groups.tensor is None:
        return local
    ranks = dist.get_process_group_ranks(groups.tensor)
    first = groups.rank == ranks[0]
    parts = [torch.empty_like(local) for _ in ranks] if first else None
    shards: list[Any] | None = [None] * len(ranks) if first else None
    dist.gather(local.contiguous(), parts, dst=ranks[0], group=groups.tensor)
    dist.gather_object(shard, shards, dst=ranks[0], group=groups.tensor)
    if parts is None or shards is None:
        return local
    whole = local.new_empty(shard.full_shape)
    for part, piece in zip(parts, shards, strict=True):
        piece.put(part, whole)
    return whole


def _partial_name(stage: int, index: int) -> str:
    return f"writing-stage-{stage:05d}-{index:05d}.safetensors"


def _gather(stage: int, files: list[dict[str, int]]) -> dict[str, dict[str, int]]:
    """All ranks' files, in order of stage, by their partial name: tensor name -> bytes."""
    entries: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(entries, (stage, files))
    return {_partial_name(at, i): file for at, written in sorted(entries, key=_stage) for i, file in enumerate(written)}


def _stage(entry: tuple[int, list[dict[str, int]]]) -> int:
    return entry[0]


def _name_files(directory: Path, written: dict[str, dict[str, int]]) -> None:
    """Give the files HuggingFace's names, with an index if there are several."""
    for old in (*directory.glob("model*.safetensors"), directory / INDEX):
        old.unlink(missing_ok=True)
    if len(written) == 1:
        (directory / next(iter(written))).rename(directory / SINGLE)
        return
    names = [f"model-{index + 1:05d}-of-{len(written):05d}.safetensors" for index in range(len(written))]
    weight_map = {}
    for (partial, tensors), name in zip(written.items(), names, strict=True):
        (directory / partial).rename(directory / name)
        weight_map.update(dict.fromkeys(tensors, name))
    total = sum(size for tensors in written.values() for size in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
