"""A layer is looked at without its weights, however large it is, and whether or not its forward looks at values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING

from harness.hf.forward.outer_forward import OuterForward
from harness.hf.layers.call import LayerInputs
from harness.hf.layers.dry_run import drawn_shapes, dry_run
from harness.hf.skeleton import build_skeleton

WIDE = {"hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 320}
LAYERS_OF_100_GB: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 4096, "intermediate_size": 1024},
    "longcat_flash": {"num_layers": 2, "n_routed_experts": 4096, "expert_ffn_hidden_size": 1024},  # loops over experts
}


def resident() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("family", LAYERS_OF_100_GB)
def test_a_layer_that_fits_into_no_memory_is_looked_at(family):
    model = build_skeleton(CONFIG_MAPPING[family](**WIDE, **LAYERS_OF_100_GB[family]))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident()
    chosen = model.config._experts_implementation
    layers = OuterForward(model, torch.device("cpu")).layers
    assert sum(parameter.nbytes for parameter in layers[0].parameters()) > 100e9
    assert resident() - before < 500e6
    assert model.config._experts_implementation == chosen


def test_what_runs_nowhere_says_why():
    def run(layer: Any, call: LayerInputs, hidden: torch.Tensor) -> None:
        raise RuntimeError(f"not on {hidden.device}")

    with pytest.raises(RuntimeError, match="not on cpu"):
        dry_run(torch.nn.Linear(2, 2, device="meta"), LayerInputs((), {}, None), torch.zeros(1, 2), run)


def test_experts_of_any_width_run_on_zeros():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 37}
    block = build_skeleton(CONFIG_MAPPING["mixtral"](**sizes, vocab_size=64)).model.layers[0].mlp

    def run(module: Any, call: LayerInputs, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.is_meta:
            raise NotImplementedError
        return call.apply(module, hidden)

    hidden = torch.zeros(1, 3, 32)
    assert dry_run(block, LayerInputs((), {}, None), hidden, run).shape == hidden.shape


class Scores(nn.Linear):
    """Biased scores with dropout, as bloom computes them: one operation whose arguments must have one dtype."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = super().forward(hidden)
        return F.dropout(hidden.baddbmm(query, query.mT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_layer_draws_is_known_also_where_its_arguments_have_16_bits(dtype: torch.dtype) -> None:
    hidden = torch.zeros(2, 3, 3, dtype=dtype)
    assert drawn_shapes(Scores(3, 6, device="meta"), LayerInputs((), {}, None), hidden) == [hidden.shape]


def test_what_a_layer_draws_is_known_also_where_it_reads_values_before() -> None:
    class Reads(Scores):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden + hidden.max().item())

    hidden, before = torch.zeros(2, 3, 3), torch.get_rng_state()
    assert drawn_shapes(Reads(3, 6, device="meta"), LayerInputs((), {}, None), hidden) == [hidden.shape]
    assert torch.equal(torch.get_rng_state(), before)
