"""What a model's parameters are, counted on the model itself where that can be built, and not read from its config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    """The elements of a decoder layer's parameters.

    Attributes:
        matrices: of all that multiply, routed experts left out.
        experts: of all routed experts.
        vectors: of norms and biases.
    """

    matrices: int
    experts: int
    vectors: int


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """The elements of a decoder's parameters; `total` counts tied ones once, and includes what surrounds the layers."""

    layers: tuple[LayerCounts, ...]
    total: int
    tied: bool
