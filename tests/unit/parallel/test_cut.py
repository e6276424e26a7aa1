"""What can be told of a cut without ranks: shapes and shards on meta, what tp = 1 costs, and every
refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from harness.errors import UserError
from harness.parallel.comm import (
    TensorParallel,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    split_to_group,
)
from harness.parallel.plans.apply import cut, own_part
from harness.parallel.plans.plan import InputRule, Plan, PlanRule, plan_for
from harness.parallel.tensor import cross_entropy
from harness.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from harness.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from harness.parallel.tensor.shard import shard_of

PLANS = Path(__file__).resolve().parents[3] / "models" / "plans"
TINY = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
KEYS = ("num_key_value_heads", "head_dim")


def on_meta(model_type: str = "llama", **sizes: Any) -> Any:
    left_out = {"gpt2": KEYS, "bloom": KEYS, "falcon": ("head_dim",)}.get(model_type, ())
    tiny = {name: size for name, size in TINY.items() if name not in left_out}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**tiny, **sizes}))


def cut_on_meta(model: Any, rank: int, size: int, **options: Any) -> Any:
    cut(model, "", plan_for(model, PLANS), TensorParallel(rank=rank, size=size), model.config, **options)
    return model


def graph_of(x: Tensor) -> list[str]:
    """The names of all nodes of the autograd graph behind `x`."""
    nodes, found = [x.grad_fn], []
    while nodes:
        node = nodes.pop()
        if node is not None:
            found.append(node.name())
            nodes += [parent for parent, _ in node.next_functions]
    return found


@pytest.mark.parametrize("function", [copy_to_group, reduce_from_group, gather_from_group, split_to_group])
def test_without_a_group_communication_is_its_own_input(function: Callable[[Tensor, None], Tensor]) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    assert function(x, None) is x


@pytest.mark.parametrize(
    ("cut_layer", "whole", "x"),
    [
        (ColumnParallelLinear, nn.Linear, torch.randn(2, 6)),
        (RowParallelLinear, nn.Linear, torch.randn(2, 6)),
        (VocabParallelEmbedding, nn.Embedding, torch.tensor([0, 5])),
    ],
)
def test_without_a_group_a_layer_is_the_one_it_replaces(cut_layer: Any, whole: Any, x: Tensor) -> None:
    torch.manual_seed(1)
    expected = whole(6, 4)(x)
    torch.manual_seed(1)
    got = cut_layer(6, 4)(x)
    assert torch.equal(got, expected)
    assert graph_of(got) == graph_of(expected)


def test_what_is_by_chance_as_wide_as_the_keys_is_shared_as_the_query_heads_are() -> None:
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 16}
    for rank, heads in enumerate((1, 1, 2)):
        model = on_meta("mimo_v2_flash", head_dim=16, v_head_dim=8, layer_types=["full_attention"] * 2, **experts)
        attention = cut_on_meta(model, rank, 3).model.layers[0].self_attn
        assert attention.k_proj.weight.shape[0] == 16  # one of two key heads, on each rank
        assert attention.o_proj.weight.shape[1] == heads * 8  # of four value heads, together as wide as two key heads


def test_one_rank_leaves_a_model_as_it_is() -> None:
    model = on_meta()
    before = list(model.modules())
    cut_on_meta(model, 0, 1)
    assert list(model.modules()) == before


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2", "gemma2", "phi3", "gpt2", "bloom"])
def test_the_ranks_parts_on_meta_are_the_model(model_type: str, size: int) -> None:
    whole = {name: tuple(param.shape) for name, param in on_meta(model_type).named_parameters()}
    held = dict.fromkeys(whole, 0)
    for rank in range(size):
        for name, param in cut_on_meta(on_meta(model_type), rank, size).named_parameters():
            shard = shard_of(param)
            if shard is None:
                assert tuple(param.shape) == whole[name]
                held[name] += param.numel() if rank == 0 else 0
            else:
                assert shard.full_shape == whole[name]
                assert shard.local_shape == tuple(param.shape)
                rows = shard.widths[rank]
                held[name] += param.numel() // param.shape[shard.dim] * rows if shard.owner else 0
    assert held == {name: torch.Size(shape).numel() for name, shape in whole.items()}


def test_a_pipeline_layer_is_cut_under_the_model_s_names() -> None:
    model = on_meta()
    layer = model.model.layers[1]
    cut(layer, "model.layers.1", plan_for(model), TensorParallel(rank=1, size=2), model.config)
    assert layer.self_attn.o_proj.weight.shape == (32, 16)
    assert isinstance(model.model.layers[0].self_attn.o_proj, nn.Linear)
    assert model.model.layers[0].self_attn.o_proj.weight.shape == (32, 32)


def test_tied_embeddings_stay_one_parameter() -> None:
    model = cut_on_meta(on_meta(tie_word_embeddings=True), 1, 2, local_logits=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (65, 32)


def test_an_attention_with_shared_heads_repeats_them_less() -> None:
    model = cut_on_meta(on_meta(), 3, 4)
    attention = model.model.layers[0].self_attn
    assert attention.num_key_value_groups == 1
    assert shard_of(attention.k_proj.weight).pieces == ((8, 16),)  # type: ignore[union-attr]
    assert not attention.k_proj.weight.tensor_model_parallel
    assert repr(attention.k_proj) == "ColumnParallelLinear(in=32, out=8 of 16, bias=False)"


@pytest.mark.parametrize(
    ("model_type", "sizes", "size", "told"),
    [
        (
            "llama",
            {},
            5,
            "tensor_parallel.autotp_size 5 does not fit the 4 attention heads and 2 key/value heads of "
            "model.layers.0.self_attn.q_proj: use at most 4",
        ),
        (
            "gpt2",
            {},
            8,
            "tensor_parallel.autotp_size 8 does not fit the 4 attention heads of "
            "transformer.h.0.attn.c_attn: use at most 4",
        ),
        (
            "llama",
            {"intermediate_size": 3},
            4,
            "tensor_parallel.autotp_size 4 does not fit the width 3 of model.layers.0.mlp.gate_proj: use at most 3",
        ),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            4,
            "tensor_parallel.autotp_size 4 does not fit the width 2 of "
            "transformer.h.0.self_attention.num_kv_heads: use at most 2",
        ),
    ],
)
def test_more_ranks_than_heads_and_widths_are_told(
    model_type: str, sizes: dict[str, int], size: int, told: str
) -> None:
    with pytest.raises(UserError) as error:
        cut_on_meta(on_meta(model_type, **sizes), 0, size)
    assert str(error.value) == told


@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_attention_keeps_its_ratio_of_heads_on_every_rank(size: int) -> None:
    sizes = {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 37}
    held = []
    for rank in range(size):
        layer = cut_on_meta(on_meta(**sizes), rank, size).model.layers[0]
        queries, keys = (layer.self_attn.get_submodule(name).weight.shape[0] // 8 for name in ("q_proj", "k_proj"))
        assert queries == keys * layer.self_attn.num_key_value_groups
        assert layer.self_attn.o_proj.weight.shape[1] == queries * 8
        held.append((queries, layer.mlp.down_proj.weight.shape[1]))
    assert held == {2: [(7, 19), (7, 18)], 3: [(4, 13), (3, 12), (7, 12)], 4: [(4, 10), (3, 9), (4, 9), (3, 9)]}[size]


@pytest.mark.parametrize(
    ("style", "module", "told"),
    [
        ("colwise", nn.LayerNorm(4), "style colwise is for nn.Linear or Conv1D, but it is a LayerNorm"),
        ("rowwise", nn.Bilinear(2, 2, 2), "style rowwise is for nn.Linear or Conv1D, but it is a Bilinear"),
        (
            "embedding_rowwise",
            nn.Linear(2, 2),
            "is for a plain nn.Embedding, but it is a Linear",
        ),
        (
            "embedding_rowwise",
            nn.Embedding(2, 2, max_norm=1.0),
            "is for a plain nn.Embedding, but it is a Embedding",
        ),
    ],
)
def test_a_style_that_does_not_fit_its_module_is_told(style: str, module: nn.Module, told: str) -> None:
    plan = Plan(model_type="any", rules={"it": PlanRule(style=style)})
    with pytest.raises(UserError, match=told):
        cut(nn.ModuleDict({"it": module}), "", plan, TensorParallel(size=2), None)


def test_an_input_is_cut_within_each_of_its_runs() -> None:
    alibi = torch.arange(8).view(8, 1)  # two samples of four heads
    assert own_part(alibi, InputRule(dim=0, run="heads"), 4, (2, 4)).flatten().tolist() == [2, 3, 6, 7]
    assert own_part(alibi, InputRule(dim=0), 8, (4, 8)).flatten().tolist() == [4, 5, 6, 7]


def test_cross_entropy_is_torch_s_and_its_gradient_too() -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 6, -100, 3])
    got = vocab_parallel_cross_entropy(logits, labels, None, 7)
    expected = F.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(got.double(), expected, rtol=1e-6)
    (grad,) = torch.autograd.grad(got.sum(), logits)
    (expected_grad,) = torch.autograd.grad(expected.sum(), logits)
    assert torch.allclose(grad, expected_grad, atol=1e-7)


def test_logits_of_a_part_that_is_computed_again_are_so_only_in_the_backward() -> None:
    computed = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        computed.append(hidden.shape)
        return hidden @ hidden.mT

    hidden = torch.randn(7, 5, requires_grad=True)
    logits = checkpoint(head, hidden, use_reentrant=False)
    loss = vocab_parallel_cross_entropy(logits, torch.arange(7), None, 7).sum()
    assert len(computed) == 1
    (grad,) = torch.autograd.grad(loss, hidden)
    (expected,) = torch.autograd.grad(F.cross_entropy(head(hidden), torch.arange(7), reduction="sum"), hidden)
    assert torch.allclose(grad, expected, atol=1e-6)


HEADS = {
    "linear": lambda x, w: F.linear(x, w),
    "capped": lambda x, w: 3 * torch.tanh(F.linear(x, w) / 3),
    "ends with what its backward needs": lambda x, w: torch.tanh(F.linear(x, w)),
    "a view of that": lambda x, w: torch.tanh(F.linear(x, w).view(6, -1)).view(2, 3, -1)[:, :, :9],
    "the input itself": lambda x, w: w[None, :6].reshape(2, 3, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HEADS)
def test_the_gradient_is_written_over_the_logits_only_where_nothing_needs_them(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "IN_CACHE", 20)  # two tokens at a time
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 3, 9), torch.randn(9, 9)
    labels = torch.tensor([[0, 8, -100], [3, 4, 5]])
    found = []
    for chunked in (True, False):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        logits = HEADS[name](*inputs)
        before = logits.detach().clone()
        if chunked:
            loss = vocab_parallel_cross_entropy(logits, labels, None, 9).sum()
        else:
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        found.append([loss.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)])
        if chunked:
            assert torch.equal(logits.detach(), before) == (name not in ("linear", "capped"))
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("label", [7, -1])
def test_a_label_outside_of_the_vocabulary_is_an_error(label: int) -> None:
    with pytest.raises(RuntimeError, match="a label is outside the vocabulary"):
        vocab_parallel_cross_entropy(torch.randn(1, 7), torch.tensor([label]), None, 7)
