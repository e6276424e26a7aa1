"""Make sure that all ranks train parts of the same model.

Each process creates its own model or modules in memory, perhaps from different random numbers, so rank 0's weights are
sent to all ranks. Before the first step, weights that must be equal on several ranks are compared by checksum,
wherever they come from.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.console import Console
from harness.deepspeed.pipeline import Layer
from harness.deepspeed.zero3_parameters import held_values
from harness.errors import UserError
from harness.hf.adapters import Adapters
from harness.hf.skeleton import ModelSource
from harness.parallel.tensor.shard import shard_of
from harness.topology.agreement import all_gather_object, any_rank, disagreement
from harness.topology.groups import Groups


def tensors_in_memory(model: Any, source: ModelSource | None, adaptation: Adapters | None) -> dict[str, Tensor]:
    """Return name -> tensor of a model or layers that the user created in this process.

    Empty for a model that the ranks read from files or initialise from the seed.
    """
    if source is not None:
        if not isinstance(source.weights, Mapping):
            return {}
        return {**source.weights, **({} if adaptation is None else adaptation.tensors)}
    layers: Sequence[Layer] = model
    modules = {str(index): layer for index, layer in enumerate(layers) if isinstance(layer, nn.Module)}
    found: dict[str, Tensor] = {}
    for index, module in modules.items():
        named = [*module.named_parameters(), *module.named_buffers()]
        found |= {f"{index}.{name}": tensor for name, tensor in named}
    return found


def take_first_ranks(tensors: Mapping[str, Tensor], device: torch.device, console: Console) -> None:
    """Overwrite `tensors` with rank 0's values if ranks differ; all ranks call it.

    Raises UserError on all ranks if names, shapes or dtypes differ.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1 or not any_rank(bool(tensors)):
        return
    form = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors.items()]
    # Two digests: other names or shapes are an error, but other values are replaced.
    own = (_digest(form), _digest([(name, checksum(tensor)) for name, tensor in tensors.items()]))
    rows = all_gather_object(own)
    if problem := disagreement("model in memory (names, shapes, what is trained)", [row[0] for row in rows]):
        raise UserError(f"{problem}: make the same model in every process")
    if len({row[1] for row in rows}) == 1:
        return
    with torch.no_grad():
        # Tied tensors once. The order is the same on all ranks, because their names are equal.
        for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
            # NCCL sends no host tensors.
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.data.copy_(sent)
    console.say("the model in memory differs between processes: training the one of rank 0")


def require_one_model(module: nn.Module, groups: Groups, zero_stage: int) -> None:
    """Raise UserError on all ranks if weights that must start equal differ; all ranks call it.

    Unsharded weights must be equal on tensor-parallel ranks; all weights on data-parallel ranks, except under ZeRO-3
    and for distributed experts; tied weights on all stages that hold them.
    """
    if groups.layout.world_size == 1:
        return
    own = _comparable(module, zero_stage)
    digests = {kind: {name: _digest(sums) for name, sums in found.items()} for kind, found in own.items()}
    whole = {kind: {"": _digest(sorted(named.items()))} if named else {} for kind, named in digests.items()}
    # One digest of all tensors is enough for an axis, but stages hold different tied weights: compare these by name.
    rows = all_gather_object({**whole, "pipeline": digests["pipeline"]})
    for axis in ("tensor", "data", "pipeline"):
        for ranks in groups.layout.groups(axis):
            if _differing([rows[rank][axis] for rank in ranks]) is not None:
                _refuse(digests[axis], ranks)


def _differing(named: Sequence[Mapping[str, str]]) -> tuple[int, str] | None:
    """Return (index, tensor name) of the first rank whose digest differs from an earlier rank's, or None."""
    first: dict[str, str] = {}
    for index, digests in enumerate(named):
        for name, digest in digests.items():
            if first.setdefault(name, digest) != digest:
                return index, name
    return None


def _refuse(own: dict[str, str], ranks: Sequence[int]) -> None:
    """Raise UserError naming the tensor; every rank calls it with the same `ranks`."""
    named = all_gather_object(own)
    differing = _differing([named[rank] for rank in ranks])
    if differing is None:
        raise UserError(f"ranks {ranks} have different tensors of one model: give every host the same files")
    index, name = differing
    other = next(rank for rank in ranks if name in named[rank])
    raise UserError(
        f"rank {ranks[index]} has different values of {name} than rank {other}, but they must be equal: give every "
        "host the same files, and seed the initialisation of your own layers"
    )


def _comparable(module: nn.Module, zero_stage: int) -> dict[str, dict[str, object]]:
    """Return, for each axis, the checksums of the tensors that must be equal along it."""
    held = dict(_held(module))
    sums: dict[str, object] = {name: checksum(tensor) for name, (tensor, _) in held.items()}
    # `GivenStages` keeps them unregistered, and a module without stages has none.
    ties = getattr(module, "__dict__", {}).get("tied_modules", {})
    spread = {name for name, p in module.named_parameters() if (shard := shard_of(p)) is not None and shard.over_data}
    return {
        "tensor": {name: sums[name] for name, (_, whole) in held.items() if whole},
        # Under ZeRO-3 each data-parallel rank holds another partition.
        "data": {} if zero_stage == 3 else {name: sums[name] for name in held if name not in spread},
        "pipeline": {
            f"{key} ({', '.join(weights.names)})": [checksum(p) for p in weights.parameters()]
            for key, weights in ties.items()
        },
    }


def _held(module: nn.Module) -> Iterator[tuple[str, tuple[Tensor, bool]]]:
    """Yield (name, (this rank's values, whether they are replicated over tensor-parallel ranks)) of all tensors."""
    persistent = module.state_dict(keep_vars=True)
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in persistent]
    for name, tensor in [*module.named_parameters(), *buffers]:
        whole = shard_of(tensor) is None and not getattr(tensor, "tensor_model_parallel", False)
        yield name, (held_values(tensor), whole)


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    # As bytes, because numpy has no bfloat16.
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
