"""A cut is compared with the whole model on a tiny copy; what was tried before is known from the matrix."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from harness.hf.causal import CausalModel, assemble
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.verify.comparison import Difference, find_difference, looks_ahead
from harness.verify.matrix import Matrix, installed_transformers, is_tested, plan_digest, read_matrix, write_matrix
from harness.verify.tiny_copy import tiny_config

CPU = torch.device("cpu")


def cut(source: ModelSource, tensor: TensorParallel, finish: Any = lambda layer: None) -> CausalModel:
    return assemble(source, tensor=tensor, device=CPU, dtype=torch.float32, seed=0, finish=finish)


@pytest.mark.parametrize("family", ["llama", "gpt2", "olmoe"])
def test_a_decoder_cut_into_layers_is_the_whole(family):
    config = tiny_config(family)
    assert find_difference(config, cut, TensorParallel(), CPU) is None
    assert not looks_ahead(config, CPU)


def test_a_layer_of_no_width_is_compared_too():
    config = tiny_config("deepseek_v3")
    config.n_shared_experts = 0
    assert find_difference(config, cut, TensorParallel(), CPU) is None


def test_a_table_that_a_layer_keeps_is_not_the_one_of_its_trial_without_values():
    config = tiny_config("moshi")
    factors = {"short_factor": [1.1] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16}
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    assert find_difference(config, cut, TensorParallel(), CPU) is None


def test_a_single_weight_that_is_off_is_seen():
    def spoil(layer: nn.Module) -> None:
        for name, parameter in layer.named_parameters():
            if name.endswith("layers.2.mlp.up_proj.weight"):
                parameter.data[0, 0] *= 1.1

    found = find_difference(tiny_config("llama"), partial(cut, finish=spoil), TensorParallel(), CPU)
    assert found is not None and 0 < found.off < 0.1


def test_a_gradient_that_is_lost_is_seen_and_named():
    def freeze(layer: nn.Module) -> None:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not name.endswith("layers.1.self_attn.k_norm.weight"))

    found = find_difference(tiny_config("qwen3"), partial(cut, finish=freeze), TensorParallel(), CPU)
    assert found == Difference(
        what="the gradient of model.layers.1.self_attn.k_norm.weight", off=1.0, tensor_parallel=False
    )


def test_an_encoder_looks_ahead():
    config = tiny_config("bert")
    config.is_decoder = False
    assert looks_ahead(config, CPU)


def test_random_numbers_go_on_as_if_nothing_had_been_tried():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    find_difference(tiny_config("llama"), cut, TensorParallel(), CPU)
    assert torch.equal(torch.rand(2), wanted)


def stored(tmp_path: Any, **changes: Any) -> Any:
    rows = {
        "llama": {"pipeline": "yes", "tensor": "refused: no plan", "plan": plan_digest(CONFIG_MAPPING["llama"])},
        "gpt2": {"pipeline": "yes", "tensor": "yes", "plan": changes.get("plan", plan_digest(CONFIG_MAPPING["gpt2"]))},
    }
    version = changes.get("transformers", installed_transformers())
    path = tmp_path / "matrix.json"
    write_matrix(Matrix(transformers=version, families=rows), path)
    assert read_matrix(path).families == rows
    return path


def config(family: str, **changes: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[family](**changes)


def test_what_was_tried_counts_for_the_same_version_plan_and_layout_alone(tmp_path):
    path = stored(tmp_path)
    assert is_tested(config("llama"), False, path) and not is_tested(config("llama"), True, path)
    assert is_tested(config("gpt2"), True, path)
    assert not is_tested(config("qwen3"), False, path)
    assert not is_tested(config("llama"), False, stored(tmp_path, transformers="1.0"))
    assert not is_tested(config("gpt2"), True, stored(tmp_path, plan="another"))


def test_a_plan_of_ones_own_was_not_tried(tmp_path):
    own = config("llama")
    own.base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise"}
    assert not is_tested(own, False, stored(tmp_path))


def test_a_plan_that_was_changed_where_it_is_declared_was_not_tried(tmp_path, monkeypatch):
    path = stored(tmp_path)
    monkeypatch.setattr(CONFIG_MAPPING["llama"], "base_model_tp_plan", {"layers.*.mlp.up_proj": "colwise"})
    assert not is_tested(config("llama"), False, path)
