"""Dropout of a decoder: the same gradients whether its layers are computed once or twice, whatever was kept before."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from harness.hf.skeleton import ModelSource
from harness.parallel.comm import ALONE
from harness.parallel.dropout import RngKeys
from harness.parallel.pipeline.staged_module import LayerSequence
from tests.support.layers import prepare

DROPOUT = dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


GPT2 = dict(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64, **dict.fromkeys(DROPOUT, 0.0))
OTHERS = dict(vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
OTHERS |= dict(num_attention_heads=4, num_key_value_heads=2)


def config(family: str = "gpt2", **changes: object) -> PretrainedConfig:
    return CONFIG_MAPPING[family](**{**(GPT2 if family == "gpt2" else OTHERS), **changes})


def gradients(model: PretrainedConfig, interval: int, packed: bool = False) -> list[dict[str, torch.Tensor]]:
    """Of the same two micro-batches, taken three times; the notes of a layer's arguments are made in the first."""
    causal = prepare(ModelSource(name="tiny", config=model, weights=None), ALONE)
    keys = RngKeys(seed=0, micro_batch=2, batch_rank=0, batch_ranks=1, tensor=ALONE, device=torch.device("cpu"))
    layers = LayerSequence(causal.layers, checkpoint_interval=interval, seed=0, keys=keys).train()
    found = []
    for _ in range(3):
        layers.zero_grad()
        keys.begin_step(0)
        for number in range(2):
            ids = torch.arange(32).view(2, 16) + 40 * number
            inputs = (ids, (torch.arange(16) % 5).expand(2, -1).contiguous()) if packed else ids
            layers(inputs).square().mean().backward()
        found.append({name: p.grad.clone() for name, p in layers.named_parameters() if p.grad is not None})
    return found


@pytest.mark.parametrize(
    ("family", "packed", "changes"),
    [("gpt2", False, DROPOUT), ("gpt2", True, DROPOUT), ("llama", True, {"attention_dropout": 0.2})],
)
def test_recomputation_and_what_is_kept_change_no_gradient(
    family: str, packed: bool, changes: dict[str, float]
) -> None:
    stored, recomputed = (gradients(config(family, **changes), interval, packed) for interval in (0, 1))
    without = gradients(config(family), 0, packed)[0]
    for name, gradient in stored[0].items():
        for other in (*stored[1:], *recomputed):
            torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    assert any(not torch.allclose(without[name], gradient) for name, gradient in stored[0].items())


def test_a_model_that_draws_nothing_is_known() -> None:
    source = [ModelSource(name="tiny", config=config(**changes), weights=None) for changes in ({}, {"attn_pdrop": 0.1})]
    jitter = config("mixtral", num_local_experts=2, router_jitter_noise=0.1)
    source.append(ModelSource(name="tiny", config=jitter, weights=None))
    assert [prepare(each).outer.uses_rng for each in source] == [False, True, True]
