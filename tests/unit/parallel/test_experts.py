"""What the expert-parallel plan makes of a model, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from harness.config.errors import UserError
from harness.parallel.apply import cut
from harness.parallel.comm import TensorParallel
from harness.parallel.experts import expert_parallel_plan
from harness.parallel.shard import shard_of

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def model_of(family: str, **sizes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES, vocab_size=128, **sizes))


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


def test_without_a_tensor_parallel_plan_only_the_experts_are_shared_out() -> None:
    model = model_of("gpt_oss", num_local_experts=4)
    cut(model, "", expert_parallel_plan(model), TensorParallel(rank=0, size=2), model.config)
    cut_ones = {name for name, param in model.named_parameters() if shard_of(param) is not None}
    assert cut_ones == {name for name, _ in model.named_parameters() if ".experts." in name}


def test_experts_that_do_not_divide_are_refused() -> None:
    model = model_of("mixtral", num_local_experts=3)
    said = "autoep_size 2 does not divide the 3 experts of model.layers.0.mlp.experts: use one of 1, 3"
    with pytest.raises(UserError, match=said):
        cut(model, "", expert_parallel_plan(model), TensorParallel(rank=0, size=2), model.config)


def test_what_the_plan_does_not_say_is_refused() -> None:
    with pytest.raises(UserError, match="declares no expert-parallel plan"):
        expert_parallel_plan(model_of("llama"))
    model = model_of("mixtral", num_local_experts=4)
    model._ep_plan = {**model.ep_plan, "model.layers.*.mlp.gate": "a new style"}
    with pytest.raises(UserError, match=r"the style 'a new style' for model.layers"):
        expert_parallel_plan(model)
