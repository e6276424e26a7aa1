"""What is decayed is what HuggingFace's Trainer decays; the norm of gradients is summed in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, Trainer, get_scheduler

from harness import TrainingArguments, UserError
from harness.arguments import SCHEDULES
from harness.deepspeed.gradient_norm import square_sum
from harness.extras.lora import Adaptation
from harness.hf.skeleton import ModelSource, build_skeleton
from harness.training.engine.optimizer import LateAdagrad, in_buckets, learning_rate_schedule, parameter_groups
from harness.verify.tiny_copy import tiny_config
from tests.support.layers import build, prepare

# biases of experts in two dimensions, vectors that are no bias, norms of many names, layers of several kinds
FAMILIES = ("gpt_oss", "llama", "gpt2", "olmoe", "mamba", "jamba", "bloom", "falcon_h1", "qwen3_next", "mpt", "bamba")
FAMILIES += ("ernie4_5_moe", "recurrent_gemma", "cohere", "rwkv", "deepseek_v3", "gpt_neox", "nemotron")


def decayed_here(module: nn.Module, **firsts: str) -> set[str]:
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    groups = parameter_groups(module, 0.1, {name.replace("_", "."): first for name, first in firsts.items()})
    assert sum(len(group["params"]) for group in groups) == len(names)
    return {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_parameters_are_decayed_as_by_transformers(family: str) -> None:
    model = build_skeleton(tiny_config(family))
    named = {name for name, _ in model.named_parameters()}
    assert decayed_here(model) == set(Trainer.get_decay_parameter_names(None, model)) & named


def test_adapters_are_decayed_as_by_transformers_and_frozen_weights_are_in_no_group() -> None:
    from peft import LoraConfig

    config = CONFIG_MAPPING["llama"](hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    adaptation = Adaptation(config=LoraConfig(r=2, target_modules=["q_proj"], bias="none"))
    source = ModelSource(name="llama", config=config, weights=None)
    layers = build(prepare(source, adaptation=adaptation)).modules.values()
    groups = parameter_groups(nn.ModuleList(layers), 0.1)
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(2, 0.1)]


def test_layers_of_a_users_own_follow_the_same_rule() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1, bias=False))
    assert decayed_here(module) == {"0.weight", "2.weight"}


def test_weights_begin_at_a_multiple_of_16_bytes_where_a_group_becomes_one_tensor() -> None:
    config = tiny_config("gpt_oss")
    config.num_attention_heads = 4
    model = build_skeleton(config)
    assert model.model.layers[0].self_attn.sinks.numel() % 8, "nothing would be out of line in any order"
    for group in parameter_groups(model, 0.1):
        starts = [0, *itertools.accumulate(parameter.numel() for parameter in group["params"])]
        assert [start for start, p in zip(starts, group["params"], strict=False) if p.ndim == 3 and start % 8] == []


def test_a_tied_parameter_is_decayed_as_in_the_first_layer_that_has_it() -> None:
    module = nn.ModuleDict(
        {"norm": nn.Linear(2, 2, bias=False), "a": nn.Linear(2, 2, bias=False), "b": nn.LayerNorm(2)}
    )
    assert decayed_here(module) == {"a.weight"}
    assert decayed_here(module, norm_weight="0.gate.weight", a_weight="0.norm.weight", b_weight="0.b.weight") == {
        "norm.weight"
    }


def test_the_sum_of_squares_of_a_large_tensor_is_exact_and_that_of_none_is_zero() -> None:
    tensor = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(tensor.double().square().sum())
    assert abs(float(tensor.norm()) ** 2 / exact - 1) > 1e-6  # what a sum in float32 loses
    assert abs(float(square_sum([tensor[:7], tensor[7:]], tensor.device)) / exact - 1) < 1e-12
    assert square_sum([], torch.device("meta")).device.type == "meta"


def test_adagrad_whose_state_comes_late_is_torchs() -> None:
    models = []
    for kind in (torch.optim.Adagrad, LateAdagrad):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias]}]
        optimizer = kind(groups, lr=0.3, lr_decay=0.1, eps=1e-8, initial_accumulator_value=0.2)
        for step in range(3):
            model(torch.full((2, 5), step + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


GIVEN: dict[str, dict[str, object]] = {
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.0, "lr_end": 1e-4},
    "inverse_sqrt": {"timescale": 7},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 8, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
}


def learning_rates(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> list[float]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-2)
    scheduler, rates = make(optimizer), []
    for _ in range(22):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_step_has_the_learning_rate_of_transformers(name: str) -> None:
    options = GIVEN.get(name, {})
    args = TrainingArguments(
        lr_scheduler_type=name, lr_scheduler_kwargs=options or None, warmup_ratio=0.25, learning_rate=1e-2
    )
    wanted = learning_rates(lambda optimizer: get_scheduler(name, optimizer, 5, 20, options))
    assert learning_rates(learning_rate_schedule(args, 20)) == wanted
    assert len(set(wanted)) > 1 or name == "constant"


def test_a_schedule_that_does_not_fit_the_learning_rate_is_refused() -> None:
    args = TrainingArguments(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 1})
    with pytest.raises(UserError, match="--lr_scheduler_type polynomial: lr_end"):
        learning_rates(learning_rate_schedule(args, 20))


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([4, 3, 2], [[4], [3, 2]]),
        ([9, 1, 1], [[9], [1, 1]]),
        ([1, 1, 9], [[1, 1], [9]]),
        ([5], [[5]]),
        ([2, 3], [[2, 3]]),
    ],
    ids=str,
)
def test_buckets_hold_as_many_parameters_as_fit_in_their_order(sizes: list[int], buckets: list[list[int]]) -> None:
    group = {"params": [nn.Parameter(torch.zeros(size)) for size in sizes], "weight_decay": 0.1}
    found = in_buckets([group], 5)
    assert [[p.numel() for p in each["params"]] for each in found] == buckets
    assert [p for each in found for p in each["params"]] == group["params"]
    assert all(each["weight_decay"] == 0.1 for each in found)
