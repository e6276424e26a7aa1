"""The number of a model's parameters, counted on the model itself instead of read from its config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    """The number of elements of a decoder layer's parameters.

    Attributes:
        matrices: elements of matrices, without routed experts.
        experts: elements of all routed experts.
        vectors: elements of norms and biases.
    """

    matrices: int
    experts: int
    vectors: int


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """The number of elements of a decoder's parameters; `total` includes those outside the layers, tied ones once."""

    layers: tuple[LayerCounts, ...]
    total: int
    tied: bool
