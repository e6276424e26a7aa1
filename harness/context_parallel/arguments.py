"""Cut the arguments of a layer to a shard of the tokens. A mask of all pairs of tokens stays whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from harness.hf.forward.outer_forward import OuterForward
from harness.hf.forward.payload import Tokens
from harness.hf.layers.attention import on_any_device
from harness.hf.layers.call import LayerInputs
from harness.parallel.context.sequence_shards import ContextParallel

Leaf: TypeAlias = tuple[int | str, int]
"""A tensor among a layer's arguments: the argument's position or name, and the tensor's index within it."""

BATCH = 2
LENGTHS = (11, 13)


@dataclass(frozen=True)
class SplitArguments:
    """Cuts the arguments of a model's layers.

    Attributes:
        dims: for each layer, tensor -> its token dimension; other tensors are not cut.
    """

    dims: tuple[Mapping[Leaf, int], ...]

    @classmethod
    def of(cls, outer: OuterForward) -> SplitArguments:
        """Find the token dimensions, in which a tensor's shape differs between two sequence lengths."""
        runs = []
        for length in LENGTHS:
            ids = torch.zeros((BATCH, length), dtype=torch.long, device=outer.device)
            with on_any_device(outer.model):
                runs.append([dict(_leaves(inputs)) for inputs in outer.make_inputs(Tokens(ids), torch.float32)])
        return cls(tuple(_token_dims(*pair) for pair in zip(*runs, strict=True)))

    def split(
        self, index: int, inputs: LayerInputs, context: ContextParallel, length: int
    ) -> tuple[LayerInputs, dict[int, Tensor]]:
        """Return the arguments of layer `index` for this rank's shard of sequences of `length` tokens.

        Tensors with a dimension of `length` tokens, [..., length, ...], become [..., own tokens, ...]. Also returns the
        uncut tensors by the `id` of their cut parts.
        """
        dims = self.dims[index]
        places = iter([leaf for leaf, _ in _leaves(inputs)])
        whole: dict[int, Tensor] = {}

        def cut(tensor: Tensor) -> Tensor:
            dim = dims.get(next(places))
            if dim is None or tensor.shape[dim] != length:
                return tensor
            own = context.own(tensor, dim)
            whole[id(own)] = tensor
            return own

        return inputs.mapped(cut), whole


def _leaves(inputs: LayerInputs) -> Iterator[tuple[Leaf, Tensor]]:
    """Yield the tensors among the arguments, in the order in which `LayerInputs.mapped` meets them."""
    for place, value in inputs.arguments().items():
        tensors: list[Tensor] = []
        LayerInputs((value,), {}, None).mapped(tensors.append)
        yield from (((place, number), tensor) for number, tensor in enumerate(tensors))


def _token_dims(short: Mapping[Leaf, Tensor], long: Mapping[Leaf, Tensor]) -> dict[Leaf, int]:
    found = {}
    for leaf in short.keys() & long.keys():
        sizes = zip(short[leaf].shape, long[leaf].shape, strict=False)
        differing = [dim for dim, (a, b) in enumerate(sizes) if a != b]
        if len(differing) == 1 and short[leaf].dim() == long[leaf].dim():
            found[leaf] = differing[0]
    return found
