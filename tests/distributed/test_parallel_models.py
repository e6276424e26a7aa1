"""Whole models, cut by their plans: logits, loss and every gradient against the uncut model.

Four ranks are launched once. They cut each family of `CASES`, tiny and random, in groups of two and in one
group of four (where two key/value heads are fewer than the ranks), once with gathered and once with
vocabulary-parallel logits, and put the gradients together through the parameters' shards. The norm is counted
as DeepSpeed counts it.
"""

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config.model.sharding import shard_range
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.apply import cut
from harness.parallel.plans.experts import run_where_aligned
from harness.parallel.plans.plan import plan_for
from harness.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from harness.parallel.tensor.shard import shard_of
from tests.support.comparing import whole_grads
from tests.support.ranks import inheriting, on_device, run_ranks

pytestmark = pytest.mark.ranks
TOLERANCE = 1e-5  # float32, sums in another order
PLANS = Path(__file__).resolve().parents[2] / "models" / "plans"
VOCABULARY = 131  # divides by neither size
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
GPT_LIKE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK_LIKE = {
    **{name: size for name, size in LLAMA_LIKE.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
INKLING_LIKE = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "sliding_window_size": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 4,
    "rel_extent": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "unpadded_vocab_size": VOCABULARY,
}
# what neither two nor four ranks share equally, or only two
ODD = {**LLAMA_LIKE, "intermediate_size": 37, "hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2}
ODD_KEYS = {**ODD, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA_LIKE),
    "llama, tied": ("llama", {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "llama, one key/value head, biases": (
        "llama",
        {**LLAMA_LIKE, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "llama, no groups": ("llama", {**LLAMA_LIKE, "num_key_value_heads": 4, "mlp_bias": True}),
    "mistral": ("mistral", {**LLAMA_LIKE, "sliding_window": 5}),
    "qwen2": ("qwen2", LLAMA_LIKE),
    "qwen3": ("qwen3", LLAMA_LIKE),
    "qwen3, tied": ("qwen3", {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", LLAMA_LIKE),
    "gemma2": ("gemma2", {**LLAMA_LIKE, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**LLAMA_LIKE, "query_pre_attn_scalar": 8}),
    "apertus, whose plan forgets the activation": ("apertus", LLAMA_LIKE),
    "cohere": ("cohere", LLAMA_LIKE),
    "cohere, a norm for each head": ("cohere", {**LLAMA_LIKE, "use_qk_norm": True}),
    "granite_swa, a sink for each head": ("granite_swa", LLAMA_LIKE),
    "inkling, whose plan forgets that gate and up are packed": ("inkling_text", {**LLAMA_LIKE, **INKLING_LIKE}),
    "mixtral": ("mixtral", {**LLAMA_LIKE, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_LIKE),
    "deepseek_v2": ("deepseek_v2", {**DEEPSEEK_LIKE, "topk_method": "greedy"}),
    "phi3": ("phi3", LLAMA_LIKE),
    "gpt2": ("gpt2", GPT_LIKE),
    "gpt2, untied": ("gpt2", {**GPT_LIKE, "tie_word_embeddings": False}),
    "bloom": ("bloom", GPT_LIKE),
    "bloom, untied": ("bloom", {**GPT_LIKE, "tie_word_embeddings": False}),
    "qwen2, fourteen heads": ("qwen2", {**ODD, "tie_word_embeddings": True}),
    "qwen3, three key/value heads": ("qwen3", ODD_KEYS),
    "llama, six heads without groups": ("llama", {**ODD_KEYS, "num_key_value_heads": 6, "mlp_bias": True}),
    "phi3, three key/value heads": ("phi3", ODD_KEYS),
    "cohere, fourteen norms": ("cohere", {**ODD, "use_qk_norm": True}),
    "granite_swa, six sinks": ("granite_swa", ODD_KEYS),
    "mixtral, an odd width": ("mixtral", {**ODD_KEYS, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "deepseek_v3, six heads": (
        "deepseek_v3",
        {**DEEPSEEK_LIKE, "num_attention_heads": 6, "num_key_value_heads": 6, "moe_intermediate_size": 19},
    ),
    "gpt2, six heads": ("gpt2", {**GPT_LIKE, "hidden_size": 48, "num_attention_heads": 6, "n_inner": 37}),
    "bloom, six heads": ("bloom", {**GPT_LIKE, "hidden_size": 48, "num_attention_heads": 6}),
}


# each case with both sizes and both kinds of logits; from one to the next the kinds change places
RUNS = [(case, size, (index + size // 4) % 2 == 0) for index, case in enumerate(CASES) for size in (2, 4)]
ONCE = [run for index, run in enumerate(RUNS) if index % 8 in (0, 3, 5, 6)]
"""Each case once; of four cases, each has another size or kind of logits."""
FIRST = ONCE[::3]
OTHERS = [run for run in RUNS if run not in FIRST]


def tiny(case: str) -> Any:
    """A random model of the case, biases and norms included, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = CASES[case]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, vocab_size=VOCABULARY, **sizes))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    run_where_aligned(model, torch.float32)
    return model.eval()


@dataclass(frozen=True)
class Whole:
    """The uncut model of a case after its backward, and what it was given and gave."""

    model: Any
    ids: Tensor
    labels: Tensor
    logits: Tensor
    loss: Tensor

    @property
    def grads(self) -> dict[str, Tensor]:
        """The gradient of each parameter, on the host."""
        return {name: param.grad.cpu() for name, param in self.model.named_parameters()}


@cache
def whole(case: str) -> Whole:
    """The uncut model, run once for all cuts of it."""
    model = tiny(case)
    ids = torch.randint(VOCABULARY, (3, 9))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return Whole(model, ids, labels, logits.detach(), loss.detach())


def norm_as_deepspeed_counts(model: nn.Module, group: dist.ProcessGroup) -> Tensor:
    """A parameter counts on a rank where it says `tensor_model_parallel`, and on tensor-parallel rank 0."""
    first = dist.get_rank(group) == 0
    counted = [p.grad for p in model.parameters() if first or getattr(p, "tensor_model_parallel", False)]
    total = sum((g.square().sum() for g in counted if g is not None), torch.zeros(()))
    dist.all_reduce(total, group=group)
    return total.sqrt()


def spread_over(group: dist.ProcessGroup, model: nn.Module) -> float:
    """The largest difference of a gradient that all ranks, or the holders of a copy, should have alike."""
    own = [
        (name, shard_of(p) and shard_of(p).pieces, p.grad.cpu())  # type: ignore[union-attr]
        for name, p in model.named_parameters()
    ]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    pairs = [(a, b) for other in everyone for a, b in zip(own, other, strict=True) if a[:2] == b[:2]]
    return max((a[2] - b[2]).abs().max().item() for a, b in pairs)


def compare(case: str, group: dist.ProcessGroup, local_logits: bool) -> dict[str, float]:
    """The largest differences, each relative to the uncut model's largest value of its kind."""
    uncut = whole(case)
    ids, labels, logits = uncut.ids, uncut.labels, uncut.logits
    part = copy.deepcopy(uncut.model)
    part.zero_grad()
    plan = plan_for(part, PLANS)
    local_logits = local_logits and plan.splits_head
    cut(part, "", plan, TensorParallel.of(group), part.config, local_logits=local_logits)
    got_logits = part(input_ids=ids, use_cache=False).logits
    seen = got_logits.detach().clone()  # the backward writes their gradient over them
    if local_logits:
        losses = vocab_parallel_cross_entropy(got_logits, labels, group, VOCABULARY)
        loss = losses.sum() / (labels != -100).sum()
        start, stop = shard_range(VOCABULARY, dist.get_rank(group), dist.get_world_size(group))
        logits = logits[..., start:stop]
    else:
        loss = F.cross_entropy(got_logits.flatten(0, 1), labels.flatten())
    loss.backward()

    grads, real = whole_grads(part, group), uncut.grads
    assert grads.keys() == real.keys(), "the cut model names its parameters otherwise"
    scale = max(grad.abs().max() for grad in real.values())
    norm = torch.stack([grad.norm() for grad in real.values()]).norm()
    return {
        "logits": ((seen - logits).abs().max() / logits.abs().max()).item(),
        "loss": ((loss - uncut.loss).abs() / uncut.loss).item(),
        # The gradient of a key's bias is zero but for rounding: hence a floor under what it is compared with.
        **{
            f"gradient of {name}": ((grads[name] - grad).abs().max() / grad.abs().max().clamp_min(scale / 100)).item()
            for name, grad in real.items()
        },
        "norm": ((norm_as_deepspeed_counts(part, group) - norm).abs() / norm).item(),
        "spread over ranks": spread_over(group, part) / scale.item(),
    }


def all_whole(runs: list[tuple[str, int, bool]]) -> None:
    """Run the uncut model of each case."""
    for case, *_ in runs:
        whole(case)


@inheriting(all_whole)
@on_device
def run_cases(runs: list[tuple[str, int, bool]]) -> dict[tuple[str, int, bool], dict[str, float]]:
    """What every rank does: cases in a size of groups, with gathered or with local logits."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[dist.get_rank() // 2], 4: dist.group.WORLD}
    return {run: compare(run[0], groups[run[1]], run[2]) for run in runs}


@pytest.mark.parametrize("runs", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_a_cut_model_is_the_model(runs: list[tuple[str, int, bool]]) -> None:
    for rank, result in enumerate(run_ranks(4, run_cases, runs, timeout_s=240)):
        wrong = {
            (*run, what): error
            for run, errors in result.items()
            for what, error in errors.items()
            if not error <= TOLERANCE
        }
        assert not wrong, f"on rank {rank}: {wrong}"
