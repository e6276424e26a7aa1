"""DoRA (arXiv 2402.09353) in every layout: the magnitudes of a linear layer's rows, trained beside its adapters.

y = (m / n) (W + s B A) x, where n [out] are the norms of the rows of W + s B A, a constant in the backward pass, and
m [out] is trained and begins as n. peft's own module reads all of W and multiplies an identity [in, in] by A and B.
Here a rank may hold some rows of W (column-parallel), some columns (row-parallel: the squares are summed over the
group), or all rows, of which it computes some.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from harness.extras.lora_cut import adapters_removed
from harness.hf.adapters import NAME
from harness.hf.layers.wrappers import Wrapper, is_wrapper, wrappers_in
from harness.hf.weights.layer_weights import ModelWeights
from harness.parallel.comm import gather_from_group, sum_over_group
from harness.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, SharedColumnLinear

ROWS_AT_ONCE = 1 << 24
"""Elements of W + s B A in memory at a time, in float32."""


class Magnitude(nn.Module):
    """The magnitudes of the rows of a linear layer, in the place of peft's `DoraLinearLayer`.

    Args:
        weight: the magnitudes [out].
        transposed: whether the layer's weight is [in, out], as that of transformers' Conv1D.
    """

    def __init__(self, weight: nn.Parameter, *, transposed: bool) -> None:
        super().__init__()
        self.weight = weight
        self.transposed = transposed

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,  # peft calls it by these names
        lora_B: nn.Linear,
        scaling: float,
        base_layer: nn.Linear,
        base_result: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Return what DoRA adds to the base layer's output [..., out], which is `base_result`.

        Without `base_result`, `x` [..., in] had dropout, and the base layer computes its output anew.
        """
        if base_result is None:
            base_result = base_layer(x)
        if base_layer.bias is not None:
            base_result = base_result - _as_output(base_layer, base_layer.bias)
        scale = _as_output(base_layer, self.weight / self._norms(lora_A, lora_B, scaling, base_layer))
        added: Tensor = (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling
        return added

    @torch.no_grad()
    def _norms(self, a: nn.Linear, b: nn.Linear, scaling: float, base: nn.Linear) -> Tensor:
        """Return the norms of the rows of W + s B A whose magnitudes this rank holds."""
        weight = base.weight.t() if self.transposed else base.weight
        at_once = max(1, ROWS_AT_ONCE // weight.shape[1])
        pairs = zip(weight.split(at_once), b.weight.split(at_once), strict=True)
        changed = (torch.addmm(w.float(), rows.float(), a.weight.float(), alpha=scaling) for w, rows in pairs)
        norms = torch.cat([torch.linalg.vector_norm(rows, dim=1) for rows in changed])
        if isinstance(base, RowParallelLinear):
            norms = sum_over_group(norms.square(), base.group).sqrt()
        return norms.to(self.weight.dtype)


def _as_output(base: nn.Linear, values: Tensor) -> Tensor:
    """Return `values` of the rows that a rank holds, one each, as values of the outputs that the layer returns."""
    if isinstance(base, SharedColumnLinear):
        return torch.cat([values[start:stop] for start, stop in base.pieces])
    if isinstance(base, ColumnParallelLinear) and base.gather_output:
        return gather_from_group(values, base.group, base.widths)
    return values


def own_magnitudes(model: nn.Module) -> None:
    """Replace peft's modules of magnitudes in `model` by those of this one."""
    for wrapper in filter(is_wrapper, model.modules()):
        magnitudes = cast("Wrapper", wrapper).lora_magnitude_vector
        for key, of_peft in magnitudes.items():
            magnitudes[key] = Magnitude(of_peft.weight, transposed=of_peft.fan_in_fan_out)


@torch.no_grad()
def initial_magnitudes(layer: nn.Module, whole: nn.Module, base: ModelWeights) -> dict[str, Tensor]:
    """Return the uncut magnitudes with which training begins: the norms of the rows of the base model's own weights.

    The weights are read whole, as a rank may hold a part of each row, and rounded to their dtype in `layer`.
    """
    found = {}
    wrappers = {name: around[0] for name, around in wrappers_in(whole).items() if around[0].lora_magnitude_vector}
    for name, wrapper in wrappers.items():
        own = layer.get_parameter(f"{name}.base_layer.weight")
        key = f"{name}.weight"
        with adapters_removed(whole):
            stored = base.values(whole, {key}, own.device)[key]
        weight = torch.empty(stored.shape, dtype=own.dtype, device=own.device).copy_(stored)
        magnitude = wrapper.lora_magnitude_vector[NAME]
        rows = weight.t() if magnitude.transposed else weight
        norms = torch.linalg.vector_norm(rows.float(), dim=1).to(magnitude.weight.dtype)
        found[f"{name}.lora_magnitude_vector.{NAME}.weight"] = norms
    return found
