"""A tiny copy of a config keeps what matters of it: kinds of layers, ratios of heads, and that it runs."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from harness.errors import UserError
from harness.verify.shrink import choose
from harness.verify.tiny_copy import shrink, tiny_config, tiny_ids, tiny_model

FAMILIES = (
    "llama",
    "gpt2",
    "mpt",
    "dbrx",
    "gemma3_text",
    "gemma3n_text",
    "deepseek_v3",
    "mamba2",
    "jamba",
    "zamba",
    "whisper",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_of_a_family_runs_and_looks_only_back(family):
    config = tiny_config(family)
    model = tiny_model(config)
    ids = tiny_ids(model)
    later = ids.clone()
    later[:, 20:] = 7
    with torch.no_grad():
        logits, others = model(input_ids=ids).logits, model(input_ids=later).logits
    assert sum(parameter.numel() for parameter in model.parameters()) < 5e6
    torch.testing.assert_close(others[:, :20], logits[:, :20], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(others[:, 20:], logits[:, 20:])


def test_no_parameter_of_a_tiny_model_is_zero():
    model = tiny_model(tiny_config("gpt2"))
    assert all(parameter.count_nonzero() == parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "tensor", "wanted"),
    [
        (32, 8, 1, (8, 2)),
        (32, 8, 4, (16, 4)),
        (64, 64, 2, (4, 4)),
        (48, 8, 2, (12, 2)),
        (32, 1, 2, (4, 1)),
        (14, 2, 4, (14, 2)),
        (28, 4, 3, (8, 4)),
        (40, 10, 4, (12, 6)),
        (71, 1, 2, (5, 1)),
        (25, 5, 2, (9, 3)),
    ],
)
def test_heads_keep_their_ratio_and_whether_ranks_can_share_them(heads, key_value_heads, tensor, wanted):
    config = CONFIG_MAPPING["llama"](
        hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=key_value_heads, head_dim=64
    )
    tiny = shrink(config, tensor=tensor)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads) == wanted
    assert tiny.hidden_size == tiny.num_attention_heads * tiny.head_dim
    assert config.hidden_size == 64 * heads


@pytest.mark.parametrize(("width", "tensor", "wanted"), [(11008, 2, 96), (11007, 2, 95), (11008, 3, 94), (37, 2, 37)])
def test_a_width_that_the_ranks_do_not_divide_stays_such_a_one(width, tensor, wanted):
    assert shrink(CONFIG_MAPPING["llama"](intermediate_size=width), tensor=tensor).intermediate_size == wanted


PUBLISHED = {  # of Falcon-H1: width, heads, recurrent heads and their size
    "1.5B-Deep": (1280, 6, 2, 24, 64, 1),
    "3B": (2560, 10, 2, 32, 128, 1),
    "34B": (5120, 20, 4, 32, 128, 2),
}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("sizes", PUBLISHED.values(), ids=PUBLISHED)
def test_a_recurrent_block_as_wide_as_its_heads_stays_so(sizes, tensor):
    width, heads, key_value_heads, recurrent, size, groups = sizes
    config = CONFIG_MAPPING["falcon_h1"](
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        mamba_n_heads=recurrent,
        mamba_d_head=size,
        mamba_d_ssm=recurrent * size,
        mamba_n_groups=groups,
    )
    tiny = shrink(config, tensor=tensor)
    assert tiny.mamba_d_ssm == tiny.mamba_n_heads * tiny.mamba_d_head <= 256


def test_a_small_model_that_no_other_sizes_fit_keeps_its_own():
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 2, "n_groups": 8, "vocab_size": 99}
    tiny = shrink(CONFIG_MAPPING["mamba2"](**sizes, chunk_size=8, num_hidden_layers=12))
    assert {name: getattr(tiny, name) for name in sizes} == sizes
    assert tiny.num_hidden_layers == 4


def test_every_kind_of_layer_is_kept_in_its_order():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    tiny = shrink(CONFIG_MAPPING["gemma3_text"](layer_types=kinds * 4, num_hidden_layers=24))
    assert tiny.layer_types == ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    dense_first = shrink(CONFIG_MAPPING["deepseek_v3"]())
    assert 0 < dense_first.first_k_dense_replace < dense_first.num_hidden_layers
    sharing = shrink(CONFIG_MAPPING["gemma3n_text"]())
    assert 0 < sharing.num_kv_shared_layers < sharing.num_hidden_layers


def test_the_first_of_each_kind_then_the_second_then_any():
    assert choose(list("aaab")) == [0, 1, 2, 3]
    assert choose(list("aaaaab") * 3) == [0, 1, 5, 11]
    assert choose(list("abcdef")) == [0, 1, 2, 3, 4, 5]
    assert choose(["a", "b"]) == [0, 1]


def test_dropout_is_off():
    tiny = shrink(CONFIG_MAPPING["gpt2"]())
    assert (tiny.resid_pdrop, tiny.embd_pdrop, tiny.attn_pdrop) == (0.0, 0.0, 0.0)


def test_a_config_that_cannot_be_made_tiny_is_told_with_the_reason():
    with pytest.raises(UserError, match=r"no tiny copy of this llama model runs: KeyError: .no such function"):
        shrink(CONFIG_MAPPING["llama"](hidden_act="no such function"))
