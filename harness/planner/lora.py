"""LoRA in a plan (Hu et al. 2021, arXiv 2106.09685): what is trained, and what a frozen base model keeps in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from harness.errors import UserError
from harness.planner.shape import LayerShape

Target: TypeAlias = Literal["query", "key", "value", "output", "gate", "up", "down"]
"""A linear layer of a decoder layer, by its purpose."""
ALL: tuple[Target, ...] = ("query", "key", "value", "output", "gate", "up", "down")
ALL_LINEAR = "all-linear"
FOUR_BITS = {False: 1 / 2 + 4 / 64, True: 1 / 2 + 1 / 64 + 4 / 64 / 256}
"""Bytes of a weight in 4 bits with the scale of its block, by whether scales are quantised too."""
_NAMES: tuple[tuple[str, tuple[Target, ...]], ...] = (
    (r"qkv(_proj)?|query_key_value|c_attn|Wqkv", ("query", "key", "value")),
    (r"gate_up_proj|gate_and_up_proj", ("gate", "up")),
    (r"q_proj|query|q_lin|wq", ("query",)),
    (r"k_proj|key|k_lin|wk", ("key",)),
    (r"v_proj|value|v_lin|wv", ("value",)),
    (r"o_proj|out_proj|out_lin|wo|dense", ("output",)),
    (r"gate_proj|w1", ("gate",)),
    (r"up_proj|w3|fc1|fc_in|c_fc|dense_h_to_4h", ("up",)),
    (r"down_proj|w2|fc2|fc_out|dense_4h_to_h", ("down",)),
    (r"c_proj", ("output", "down")),
)
"""The purposes of linear layers by their names in models of transformers."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters on linear layers of decoder layers, whose own weights are frozen.

    Attributes:
        rank: their rank.
        targets: the layers that have one.
        weight_bytes: bytes of a frozen weight of all linear layers of decoder layers; None: as other weights.
    """

    rank: int
    targets: frozenset[Target]
    weight_bytes: float | None = None

    def parameters(self, layer: LayerShape, tp_size: int) -> float:
        """Return the number of a rank's parameters in the adapters of a layer.

        The adapter of a layer that is split by outputs has its second matrix split, that of one by inputs its first.
        """
        total = 0.0
        for name, inputs, outputs in linear_layers(layer):
            if name in self.targets:
                by_inputs = name in ("output", "down")
                total += inputs / (tp_size if by_inputs else 1) + outputs / (1 if by_inputs else tp_size)
        return self.rank * total

    def matrices(self, layer: LayerShape) -> int:
        """Return the number of adapters of a layer."""
        return sum(name in self.targets for name, _, _ in linear_layers(layer))

    def adapts(self, *targets: Target) -> bool:
        """Return whether one of these layers has an adapter, which keeps the layer's input for its gradient."""
        return not self.targets.isdisjoint(targets)


def linear_layers(layer: LayerShape) -> Iterator[tuple[Target, int, int]]:
    """Yield purpose, inputs and outputs of each linear layer, without routed experts."""
    if layer.kv_rank:
        first, *others = layer.attention_matrices
        yield "query", *first
        by_inputs: dict[int, Target] = {layer.hidden: "key", layer.q_rank: "query"}
        for inputs, outputs in others:
            yield by_inputs.get(inputs, "value"), inputs, outputs
    elif layer.heads:
        yield from (("query", layer.hidden, layer.query), ("key", layer.hidden, layer.key))
        yield "value", layer.hidden, layer.value
    if layer.output:
        yield "output", layer.output, layer.hidden
    if layer.dense_ffn:
        if layer.gated:
            yield "gate", layer.hidden, layer.dense_ffn
        yield from (("up", layer.hidden, layer.dense_ffn), ("down", layer.dense_ffn, layer.hidden))


def targets_of(names: Sequence[str]) -> frozenset[Target]:
    """Return the layers that `--lora_target_modules` names. Raises UserError for a name of which they are not known."""
    if list(names) == [ALL_LINEAR]:
        return frozenset(ALL)
    found: set[Target] = set()
    for name in names:
        own = next((targets for pattern, targets in _NAMES if re.fullmatch(pattern, name.rpartition(".")[2])), None)
        if own is None:
            raise UserError(
                f"--lora_target_modules {name}: the planner does not know this layer: name others, give {ALL_LINEAR}, "
                "or see `ds-harness dry-run`, which builds the model"
            )
        found.update(own)
    return frozenset(found)
