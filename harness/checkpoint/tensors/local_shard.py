"""Describe this rank's part of each stored tensor, in any layout and ZeRO stage.

Tensor parallelism gives a rank a shard of a tensor; ZeRO gives it a range of consecutive elements of the flattened
shard. `LocalShard.pieces` converts both into boxes of the whole tensor. So every rank writes its values to their place
in the whole tensor, and a run in any layout can read its shards from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, nn

from harness.deepspeed.flat_tensors import (
    EngineOptimizer,
    ParameterSlice,
    UpdatedTensor,
    parameter_slices,
    updated_tensors,
)
from harness.deepspeed.zero3_parameters import Partition, held_values, is_partitioned
from harness.hf.weights.lazy_tensor import Box
from harness.parallel.tensor.shard import Shard, shard_of
from harness.parallel.zero import boxes_of_run
from harness.topology.groups import Groups


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalShard:
    """This rank's elements of a tensor.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape: shape of this rank's tensor-parallel shard, or of a replicated tensor.
        shard: position of the tensor-parallel shard in the whole tensor; None for a whole tensor.
        start: index of this rank's first element in the flattened shard, which ZeRO divides.
        values: these elements [n], or the complete shard in its shape.
        owned: whether this rank writes them; of several ranks with the same elements, exactly one does.
        updated: the tensor that the optimizer updates, and the range of these elements in it; None if frozen.
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard | None
    start: int
    values: Tensor
    owned: bool
    updated: tuple[UpdatedTensor, ParameterSlice] | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.shape if self.shard is None else self.shard.full_shape

    def of_state(self, state: Tensor) -> LocalShard:
        """Return the same elements of an optimizer state such as `exp_avg`.

        `state` has the shape of the tensor in `updated`.
        """
        assert self.updated is not None
        return replace(self, values=_elements(state, self.updated[1]))

    def pieces(self) -> Iterator[tuple[Box, Tensor]]:
        """Yield (box of the whole tensor, view of `values` in the box's shape)."""
        for first, view in self._local_pieces():
            if self.shard is None or not self.shape:
                yield _box(first, view), view
                continue
            # A shard may consist of several spans of the whole dimension (query, key and value in one matrix). A span,
            # elements `start` to `stop` of the whole, begins at `offset` in the shard. Cut each box by the spans.
            dim = self.shard.dim
            for start, stop, offset in self.shard.spans():
                low = max(first[dim], offset)
                high = min(first[dim] + view.shape[dim], offset + stop - start)
                if low < high:
                    part = view.narrow(dim, low - first[dim], high - low)
                    yield _box((*first[:dim], start + low - offset, *first[dim + 1 :]), part), part

    def _local_pieces(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield (first index in the shard, view of `values`) of boxes that cover this rank's elements."""
        if tuple(self.values.shape) == self.shape:
            yield (0,) * len(self.shape), self.values
            return
        at = 0
        for index in boxes_of_run(self.shape, self.start, self.start + self.values.numel()):
            spans = [part if isinstance(part, slice) else slice(part, part + 1) for part in index]
            first = (*(span.start for span in spans), *(0,) * (len(self.shape) - len(spans)))
            extent = (*(span.stop - span.start for span in spans), *self.shape[len(spans) :])
            size = prod(extent)
            yield first, self.values[at : at + size].view(extent)
            at += size


def local_shards(
    module: nn.Module, optimizer: EngineOptimizer, groups: Groups, *, rename: Callable[[str], str], trained_only: bool
) -> list[LocalShard]:
    """Return this rank's shards of the tensors of `module`, renamed by `rename`.

    For trained tensors these are the values that the engine's `optimizer` updates, float32 in every precision. Frozen
    parameters and persistent buffers are included unless `trained_only`. All ranks with the same layers return the same
    names in the same order.
    """
    places = {
        id(local.parameter): (each, local) for each in updated_tensors(optimizer) for local in parameter_slices(each)
    }
    found = []
    for name, tensor in saved_tensors(module):
        if id(tensor) in places:
            found.append(_trained(rename(name), *places[id(tensor)], groups))
        elif not trained_only:
            found.append(local_shard_of(rename(name), tensor, groups))
    return found


def saved_tensors(module: nn.Module, *, each_name: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of parameters and persistent buffers, in the same order on all ranks.

    A tied parameter comes under its first name, or with `each_name` under every name.
    """
    persistent = set(module.state_dict(keep_vars=True))
    yield from module.named_parameters(remove_duplicate=not each_name)
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def local_shard_of(name: str, tensor: Tensor, groups: Groups) -> LocalShard:
    """Return this rank's shard of a parameter or buffer, which ZeRO-3 may have partitioned, in its own dtype."""
    shard = shard_of(tensor)
    is_first = _is_first(shard, groups)
    if is_partitioned(tensor):
        part = Partition.of(tensor)
        values = held_values(tensor)
        # Owned on every data-parallel rank, because each has other elements of it.
        return LocalShard(name=name, shape=part.shape, shard=shard, start=part.start, values=values, owned=is_first)
    owned = is_first and _is_first_on_data(shard, groups)
    return LocalShard(name=name, shape=tuple(tensor.shape), shard=shard, start=0, values=tensor.detach(), owned=owned)


def _trained(name: str, updated: UpdatedTensor, local: ParameterSlice, groups: Groups) -> LocalShard:
    shard = shard_of(local.parameter)
    return LocalShard(
        name=name,
        shape=local.shape,
        shard=shard,
        start=local.start,
        values=_elements(updated.tensor.detach(), local),
        owned=_is_first(shard, groups) and (local.group is not None or _is_first_on_data(shard, groups)),
        updated=(updated, local),
    )


def _is_first(shard: Shard | None, groups: Groups) -> bool:
    """Return whether this is the first tensor-parallel rank with these values."""
    return groups.coordinate.tp_rank == 0 if shard is None else shard.owner


def _is_first_on_data(shard: Shard | None, groups: Groups) -> bool:
    """Return whether this is the first data-parallel rank with these values."""
    # The first `ep_data_size` ranks together hold all experts.
    if shard is not None and shard.over_data:
        return groups.coordinate.dp_rank < groups.layout.ep_data_size
    return groups.coordinate.dp_rank == 0


def _elements(tensor: Tensor, local: ParameterSlice) -> Tensor:
    """Return the elements of `local` in the optimizer's tensor: flat, or the whole tensor for a single parameter."""
    # The shape alone does not decide: a ZeRO partition may have it by chance.
    if local.group is None and tuple(tensor.shape) == local.shape:
        return tensor
    return tensor.view(-1)[local.offset : local.offset + local.length]


def _box(first: tuple[int, ...], values: Tensor) -> Box:
    return tuple((at, at + size) for at, size in zip(first, values.shape, strict=True))
