"""What layers cost is counted from a real model as the planner counts it from the config: both cut a model alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import MambaConfig, MambaForCausalLM

from harness.config.model.facts import experts_of
from harness.hf.causal import layer_costs
from harness.parallel.pipeline.partition import balanced
from harness.planner.model_config import decoder_of
from harness.planner.workload import stages_of
from tests.support.models import model_of

TABLE = {"vocab_size": 4000, "num_hidden_layers": 6}
MANY = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": []}
DEEPSEEK = {
    "first_k_dense_replace": 2,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("gpt2", {"n_inner": 96, "num_key_value_heads": 4}, id="gpt2: two tables"),
        pytest.param("qwen3_moe", MANY, id="qwen3_moe: a few of many experts"),
        pytest.param("mixtral", {"num_local_experts": 16, "num_experts_per_tok": 2}, id="mixtral"),
        pytest.param("deepseek_v3", DEEPSEEK, id="deepseek_v3: dense layers, then shared and routed experts"),
    ],
)
@pytest.mark.parametrize("stages", [2, 3])
def test_a_plan_cuts_a_model_where_a_run_does(family: str, changes: dict[str, Any], stages: int) -> None:
    with torch.device("meta"):
        model = model_of(family, **TABLE, **changes)
    body, layers = model.base_model, getattr(model.base_model, "layers", None) or model.base_model.h
    outside = [child for name, child in body.named_children() if name not in ("layers", "h", "norm", "ln_f")]
    last = [getattr(body, "norm", None) or body.ln_f, model.get_output_embeddings()]
    modules: list[list[nn.Module]] = [outside, *([layer] for layer in layers), last]
    costs = layer_costs(modules, model.config, TABLE["vocab_size"], 64, checkpointed=False)
    run = balanced([cost.flops_per_token() for cost in costs], stages)
    planned = stages_of(decoder_of(model.config.to_dict(), family), stages, "balanced", 64, checkpointed=False)
    ends = [1 + sum(stage.depth for stage in planned[: index + 1]) for index in range(stages - 1)]
    assert run[1:-1] == ends


def test_a_token_is_multiplied_with_its_own_experts_alone() -> None:
    def cost(**changes: Any) -> float:
        with torch.device("meta"):
            model = model_of("qwen3_moe", **{**MANY, **changes})
        layer: list[nn.Module] = [model.base_model.layers[0]]
        own = layer_costs([[], layer, []], model.config, 0, 0, checkpointed=False)[1]
        return own.matmul_parameters

    expert, router = 3 * 64 * 48, 64
    assert cost(num_experts_per_tok=5) - cost() == 3 * expert
    assert cost(num_experts=64) - cost() == 32 * router  # which every token meets whole


@pytest.mark.parametrize(
    ("given", "found"),
    [
        pytest.param({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2), id="mixtral's names"),
        pytest.param({"n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8), id="deepseek's names"),
        pytest.param({"num_experts": 4}, (4, 1), id="a number that a token meets is not said"),
        pytest.param({"num_experts": 2, "moe_topk": 6}, (2, 2), id="more than there are"),
        pytest.param({"num_experts": None, "num_experts_per_tok": None}, (0, 0), id="null"),
        pytest.param({"num_experts": 0, "num_experts_per_tok": 2}, (0, 0), id="none"),
        pytest.param({"hidden_size": 64}, (0, 0), id="dense"),
        pytest.param({"num_experts": [4, 8], "num_experts_per_tok": True}, (0, 0), id="no numbers"),
    ],
)
def test_experts_are_read_by_any_of_their_names(given: dict[str, object], found: tuple[int, int]) -> None:
    assert experts_of(given) == found


def test_layers_without_attention_cost_the_same_at_any_length() -> None:
    sizes = MambaConfig(hidden_size=64, state_size=4, time_step_rank=4, num_hidden_layers=1, vocab_size=8)
    with torch.device("meta"):
        layer: list[nn.Module] = [MambaForCausalLM(sizes).backbone.layers[0]]
    short, long = (layer_costs([[], layer, []], sizes, 0, length, checkpointed=False)[1] for length in (8, 8000))
    assert short.flops_per_token() == long.flops_per_token() > 0
