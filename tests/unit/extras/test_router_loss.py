"""The router loss of a model in pipeline layers is the loss that the model itself makes, and so are its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from harness.extras.router_loss import router_capture
from harness.hf.causal import CausalModel
from harness.hf.skeleton import ModelSource
from harness.parallel.pipeline.staged_module import build_layers
from harness.training.engine.losses import CausalLoss, RouterLoss, targets
from tests.support.layers import prepare
from tests.support.models import model_of

SIZES = dict(num_hidden_layers=4, num_experts_per_tok=2, moe_intermediate_size=48)
# further names: attention is routed too; every other layer is dense, or not even attention
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "router_aux_loss_coef": 0.02},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [0], "router_aux_loss_coef": 0.001},
    "jetmoe": {"kv_channels": 16, "num_local_experts": 4, "aux_loss_coef": 0.01},
    "jamba": {"num_experts": 4, "mamba_d_state": 8, "use_mamba_kernels": False, "router_aux_loss_coef": 0.0005},
}


def routed(family: str) -> PreTrainedModel:
    return model_of(family, **SIZES, **CASES[family], output_router_logits=True, use_cache=False).train()


def prepared(model: PreTrainedModel) -> CausalModel:
    return prepare(ModelSource.of_model(model), routers=router_capture)


@pytest.mark.parametrize("family", CASES)
def test_the_router_loss_and_its_gradients_are_the_models_own(family: str) -> None:
    model = routed(family)
    ids = torch.randint(320, (2, 16), generator=torch.Generator().manual_seed(1))
    wanted = model(input_ids=ids, labels=ids)
    wanted.loss.backward()
    causal = prepared(model)
    assert causal.router is not None
    assert causal.router.coefficient == next(value for name, value in CASES[family].items() if "coef" in name)
    built = build_layers(causal.layers, 0, len(causal.layers), seed=0)
    value: Any = ids
    for layer in built.calls:
        value = layer(value)
    logits, router_loss = value
    assert torch.equal(logits, wanted.logits)
    assert torch.equal(router_loss, wanted.aux_loss)
    loss = RouterLoss(CausalLoss(vocab_size=320, group=None), causal.router.coefficient)
    total = loss(value, targets(ids, weight=1 / 30, rows=2))
    torch.testing.assert_close(total, wanted.loss, rtol=1e-6, atol=0)
    total.backward()
    got = {name: p.grad for module in built.modules.values() for name, p in module.named_parameters()}
    for name, parameter in model.named_parameters():
        if name in got and parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_a_family_that_makes_no_router_loss_has_none() -> None:
    sizes = {**SIZES, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
    sizes |= dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
    sizes["head_dim"] = 8
    assert prepared(model_of("deepseek_v3", **sizes)).router is None


def test_in_an_evaluation_each_sample_weighs_the_same_in_the_router_loss() -> None:
    loss = RouterLoss(CausalLoss(vocab_size=4, group=None), coefficient=0.5)
    logits, labels = torch.zeros(2, 3, 4), torch.full((2, 3), -100)
    assert loss((logits, torch.tensor(2.0)), targets(labels, weight=1.0, rows=1, router_weight=0.5)) == 0.5
    assert loss.parts((logits, torch.tensor(2.0))) == {"aux_loss": torch.tensor(2.0)}
