"""A cache of what layers are given besides the hidden state.

A decoder's masks and rotary tables are the same for every micro-batch of a shape. Where they are made from token or
position ids, they are the same for one micro-batch, in its forward and again where activations are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.hf.forward.payload import Tokens
from harness.hf.layers.inputs import LayerInputs

KEPT_SHAPES = 4
KEPT_BATCHES = 2

Make = Callable[[Tokens, torch.dtype], list[LayerInputs]]
"""Makes the inputs of all layers, for these ids and hidden states of this dtype."""


@dataclass(frozen=True)
class HiddenShape:
    """Batch, sequence length and dtype of a hidden state."""

    batch: int
    sequence: int
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, tokens: Tokens | None) -> HiddenShape:
        """Return the shape of the ids where they travel, else what the hidden state shows of it."""
        rows = hidden.shape if tokens is None else tokens.ids.shape
        return cls(rows[0], rows[1], hidden.dtype)

    def tokens(self, device: torch.device) -> Tokens:
        """Return some ids of this shape."""
        return Tokens(torch.zeros((self.batch, self.sequence), dtype=torch.long, device=device))


class LayerInputCache:
    """The inputs of all layers, made by `make` when they are first asked for."""

    def __init__(self, make: Make, device: torch.device) -> None:
        self._make = make
        self._device = device
        self._by_shape: dict[HiddenShape, list[LayerInputs]] = {}
        self._by_batch: list[tuple[Tokens, torch.dtype, list[LayerInputs]]] = []

    def of_shape(self, shape: HiddenShape) -> list[LayerInputs]:
        """Return the inputs for every micro-batch of a shape."""
        if shape not in self._by_shape:
            while len(self._by_shape) >= KEPT_SHAPES:
                self._by_shape.pop(next(iter(self._by_shape)))
            self._by_shape[shape] = self._make(shape.tokens(self._device), shape.dtype)
        return self._by_shape[shape]

    def of_batch(self, tokens: Tokens, dtype: torch.dtype) -> list[LayerInputs]:
        """Return the inputs for one micro-batch."""
        for known, known_dtype, inputs in self._by_batch:
            if known_dtype == dtype and _share_memory(known, tokens):
                return inputs
        # the tokens are kept with the inputs, so that their memory is not used for others meanwhile
        self._by_batch = self._by_batch[1 - KEPT_BATCHES :]
        self._by_batch.append((tokens, dtype, self._make(tokens, dtype)))
        return self._by_batch[-1][2]


def _share_memory(known: Tokens, tokens: Tokens) -> bool:
    """Whether both are the same tensors, or other views of their memory, as activation checkpointing makes them."""
    return len(known.tensors()) == len(tokens.tensors()) and all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
        for a, b in zip(known.tensors(), tokens.tensors(), strict=True)
    )
