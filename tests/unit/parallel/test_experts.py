"""What the expert-parallel plan makes of a model, on the meta device."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from harness.errors import UserError
from harness.parallel.comm import ALONE, TensorParallel
from harness.parallel.plans.apply import cut
from harness.parallel.plans.experts import expert_parallel_plan
from harness.parallel.plans.plan import plan_for
from harness.parallel.tensor.shard import shard_of
from harness.parallel.token_exchange import Neighbours
from tests.support.plan_models import PLANS

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def model_of(family: str, **sizes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**SIZES, "vocab_size": 128, **sizes}))


def test_experts_are_shared_out_and_all_else_is_cut_as_before() -> None:
    model = model_of("mixtral", num_local_experts=4)
    cut(model, "", expert_parallel_plan(model), TensorParallel(rank=1, size=2), model.config)
    layer = model.model.layers[0]
    assert layer.mlp.experts.num_experts == 2
    for param in layer.mlp.experts.parameters():
        shard = shard_of(param)
        assert shard is not None
        assert (shard.dim, shard.pieces, shard.full_shape[0], param.shape[0]) == (0, ((2, 4),), 4, 2)
    assert shard_of(layer.mlp.gate.weight) is None
    assert layer.self_attn.q_proj.weight.shape == (16, 32)


def test_neighbours_on_the_data_axis_hold_whole_experts_and_all_else() -> None:
    for rank, experts in ((0, (0, 3)), (1, (3, 5))):  # the second is filled up to 3
        model = model_of("mixtral", num_local_experts=5)
        neighbours = Neighbours(ranks=TensorParallel(rank=rank, size=2))
        cut(model, "", expert_parallel_plan(model, tp_size=1), ALONE, model.config, neighbours=neighbours)
        for name, param in model.named_parameters():
            shard = shard_of(param)
            assert (shard is not None) is (".experts." in name)
            if shard is not None:
                assert (shard.pieces, shard.length, shard.over_data, param.shape[0]) == ((experts,), 3, True, 3)


def test_experts_are_dealt_to_tensor_parallel_ranks_first() -> None:
    held = []
    for rank, neighbour in product(range(2), range(2)):
        model = model_of("mixtral", num_local_experts=8)
        place = TensorParallel(rank=rank, size=2)
        neighbours = Neighbours(ranks=TensorParallel(rank=neighbour, size=2))
        cut(model, "", expert_parallel_plan(model), place, model.config, neighbours=neighbours)
        shard = shard_of(model.model.layers[0].mlp.experts.down_proj)
        assert shard is not None
        held += shard.pieces
    assert held == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_without_a_tensor_parallel_plan_only_the_experts_are_shared_out() -> None:
    model = model_of("gpt_oss", num_local_experts=4)
    cut(model, "", expert_parallel_plan(model), TensorParallel(rank=0, size=2), model.config)
    cut_ones = {name for name, param in model.named_parameters() if shard_of(param) is not None}
    assert cut_ones == {name for name, _ in model.named_parameters() if ".experts." in name}


def test_the_first_ranks_take_one_expert_more() -> None:
    held = []
    for rank in range(2):
        model = model_of("mixtral", num_local_experts=3)
        cut(model, "", expert_parallel_plan(model), TensorParallel(rank=rank, size=2), model.config)
        held.append(model.model.layers[0].mlp.experts.num_experts)
    assert held == [2, 1]


def test_fewer_experts_than_ranks_are_refused() -> None:
    model = model_of("mixtral", num_local_experts=3)
    said = "autoep_size 4 does not fit the 3 experts of model.layers.0.mlp.experts: use at most 3"
    with pytest.raises(UserError, match=said):
        cut(model, "", expert_parallel_plan(model), TensorParallel(rank=0, size=4), model.config)


@pytest.mark.parametrize(("family", "sizes"), [("mixtral", {}), ("gpt_oss", {"head_dim": 8})])
def test_shares_of_experts_are_padded_to_whole_16_bytes(family: str, sizes: dict[str, int]) -> None:
    model = model_of(family, num_local_experts=4, **{**sizes, "intermediate_size": 37})
    cut(model, "", plan_for(model, PLANS), TensorParallel(rank=1, size=2), model.config)
    experts = model.model.layers[0].mlp.experts
    assert sorted(experts.gate_up_proj.shape) == [4, 32, 48]
    assert sorted(experts.down_proj.shape) == [4, 24, 32]
    shards = [shard_of(getattr(experts, name)) for name in ("gate_up_proj", "down_proj")]
    assert [shard.widths for shard in shards if shard is not None] == [(38, 36), (19, 18)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_without_experts_of_a_family_that_has_some_is_refused(ranks: int) -> None:
    with pytest.raises(UserError, match="this gemma4_text model has no experts: remove expert_parallel"):
        expert_parallel_plan(model_of("gemma4_text", enable_moe_block=False), tp_size=ranks)


def test_what_the_plan_does_not_say_is_refused() -> None:
    with pytest.raises(UserError, match="declares no expert-parallel plan"):
        expert_parallel_plan(model_of("llama"))
    model = model_of("mixtral", num_local_experts=4)
    model._ep_plan = {**model.ep_plan, "model.layers.*.mlp.gate": "a new style"}
    with pytest.raises(UserError, match=r"the unknown style 'a new style' for model.layers"):
        expert_parallel_plan(model)
