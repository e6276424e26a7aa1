"""Experts distributed over ranks with other tokens: logits and every gradient are those of the whole model.

The ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from threading import Lock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from transformers import PretrainedConfig

from harness.extras.expert_exchange import early_modules
from harness.extras.expert_exchange.exchange import exchange_tokens
from harness.extras.lora_cut import cut_with_adapters
from harness.hf.causal import CausalModel, assemble
from harness.hf.locate import PLANS
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import ALONE, TensorParallel
from harness.parallel.plans.apply import cut
from harness.parallel.plans.experts import expert_parallel_plan, run_experts_by
from harness.parallel.tensor.shard import shard_of
from harness.parallel.token_exchange import Neighbours
from harness.verify import comparison
from harness.verify.comparison import Difference, find_difference
from harness.verify.tiny_copy import tiny_config, tiny_ids, tiny_model
from tests.support.threads import run_threads

RELATIVE = 2e-5  # of a tensor's largest entry; the smallest gradients of all are made of rounding
ADAPTED = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])


@cache
def _made_once(family: str) -> PretrainedConfig:
    return tiny_config(family, tensor=2)


def config_of(family: str) -> PretrainedConfig:
    """A tiny config of a family, to be changed."""
    return deepcopy(_made_once(family))


def with_adapters(model: Any) -> None:
    inject_adapter_in_model(ADAPTED, model)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_" in name:
                param.normal_(std=0.1)


def one_expert(model: Any) -> None:
    """Send all tokens to the first experts."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()


def by_loop(model: Any) -> None:
    run_experts_by(model.config, "eager")


def as_it_is(_model: Any) -> None:
    pass


def backward(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    wanted = torch.randn(logits.shape[1:], generator=torch.Generator().manual_seed(2))
    (logits * wanted).sum().backward()
    return logits.detach()


def gradient_of(param: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What a rank adds to the gradient of a whole tensor."""
    shard, grad = shard_of(param), torch.zeros_like(param) if param.grad is None else param.grad
    if shard is None:
        return grad
    whole = torch.zeros(shape)
    shard.put(grad, whole)
    return whole


CASES = [
    pytest.param("mixtral", 1, 3, {"num_local_experts": 8}, as_it_is, 32, 3, id="3, 3 and 2 experts, 3 pieces"),
    pytest.param("mixtral", 1, 4, {"num_local_experts": 4}, by_loop, 1, 2, id="ranks and pieces without any token"),
    pytest.param("mixtral", 1, 2, {}, one_expert, 32, 1, id="all tokens to one rank"),
    pytest.param("qwen3_moe", 2, 2, {"num_experts": 5}, with_adapters, 32, 1, id="over both axes, with adapters"),
    pytest.param("deepseek_v3", 2, 2, {}, as_it_is, 32, 1, id="shared experts, a router with a bias"),
    pytest.param("deepseek_v3", 1, 2, {}, as_it_is, 32, 2, id="a shared expert beside two pieces"),
    pytest.param("inkling_text", 1, 2, {}, as_it_is, 32, 1, id="a shared expert that is given more than tokens"),
    pytest.param("gpt_oss", 1, 2, {}, as_it_is, 32, 1, id="biases of experts"),
    pytest.param("dbrx", 1, 2, {}, as_it_is, 32, 1, id="a plan file"),
]


@pytest.mark.parametrize(("family", "tensor", "data", "fields", "change", "length", "pieces"), CASES)
def test_every_gradient_is_that_of_the_whole_model(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    tensor: int,
    data: int,
    fields: dict[str, int],
    change: Callable[[Any], None],
    length: int,
    pieces: int,
) -> None:
    monkeypatch.setattr(early_modules, "WITHOUT_GAIN", set())
    config = config_of(family)
    vars(config).update(fields)
    whole, *parts = (tiny_model(config) for _ in range(1 + tensor * data))
    for model in (whole, *parts):
        change(model)
    ids = torch.cat([tiny_ids(whole, seed) for seed in range(data)])[:data, :length]
    logits = backward(whole, ids)
    plans = [expert_parallel_plan(part, PLANS, tp_size=tensor) for part in parts]

    def rank(number: int) -> Tensor:
        same = [dist.new_group([*range(at, at + tensor)]) for at in range(0, tensor * data, tensor)][number // tensor]
        others = [dist.new_group([*range(at, tensor * data, tensor)]) for at in range(tensor)][number % tensor]
        place = ALONE if tensor == 1 else TensorParallel(group=same, rank=number % tensor, size=tensor)
        place_of_experts = TensorParallel(group=others, rank=number // tensor, size=data)
        neighbours = Neighbours(ranks=place_of_experts, pieces=pieces, exchange=exchange_tokens)
        text = config.get_text_config(decoder=True)
        cut_with_adapters(parts[number], plans[number], place, text, neighbours=neighbours)
        row = number // tensor
        return backward(parts[number], ids[row : row + 1])

    found = torch.cat(run_threads(tensor * data, rank)[::tensor])
    assert (found - logits).abs().max() < RELATIVE * logits.abs().max()
    named = [dict(part.named_parameters()) for part in parts]
    trained = {name: param for name, param in whole.named_parameters() if param.grad is not None}
    least = 1e-6 * max(param.grad.abs().max().item() for param in trained.values() if param.grad is not None)
    dealt = 0
    for name, param in trained.items():
        assert param.grad is not None
        total = torch.zeros_like(param)
        for number, own in enumerate(named):
            shard = shard_of(own[name])
            dealt += shard is not None and shard.over_data
            if number % tensor == 0 or (shard is not None and shard.owner):  # once for each set of tokens
                total += gradient_of(own[name], tuple(param.shape))
        off = (total - param.grad).abs().max().item()
        assert off < max(RELATIVE * param.grad.abs().max().item(), least), (name, off)
    assert dealt


def test_a_shared_expert_runs_once_while_tokens_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not beside them where the cores that carry tokens are those that compute, nor what is called before."""
    config = config_of("deepseek_v3")
    ids = tiny_ids(tiny_model(config))

    def order(early: bool) -> list[list[str]]:
        monkeypatch.setattr(early_modules, "WITHOUT_GAIN", set() if early else {"cpu"})
        parts = [tiny_model(config) for _ in range(2)]

        def rank(number: int) -> list[str]:
            said: list[str] = []
            neighbours = Neighbours(
                ranks=TensorParallel(group=dist.group.WORLD, rank=number, size=2), exchange=exchange_tokens
            )
            cut(parts[number], "", expert_parallel_plan(parts[number], tp_size=1), ALONE, config, neighbours=neighbours)
            block: Any = parts[number].model.layers[-1].mlp
            block.shared_experts.up_proj.register_forward_hook(lambda *_: said.append("shared"))
            block.experts.act_fn.register_forward_hook(lambda *_: said.append("routed"))
            backward(parts[number], ids[number : number + 1])
            return said

        return run_threads(2, rank)

    assert order(early=True) == [["shared", "routed"]] * 2
    assert order(early=False) == [["routed", "shared"]] * 2


def test_what_is_dealt_is_held_to_the_whole_model_on_a_tiny_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cpu, alone = config_of("mixtral"), torch.device("cpu"), Lock()
    config.num_hidden_layers = 1

    def made(*args: Any, **options: Any) -> Any:
        with alone:  # threads have one generator of random numbers
            return tiny_model(*args, **options)

    monkeypatch.setattr(comparison, "tiny_model", made)

    def found(factor: float) -> list[Difference | None]:
        def rank(number: int) -> Difference | None:
            neighbours = TensorParallel(group=dist.group.WORLD, rank=number, size=2)

            def finish(layer: Any) -> None:
                for name, param in layer.named_parameters():
                    if number == 1 and name.endswith("down_proj"):
                        param.data.mul_(factor)

            def cut_tiny(source: ModelSource, place: TensorParallel) -> CausalModel:
                return assemble(
                    source,
                    tensor=place,
                    device=cpu,
                    dtype=torch.float32,
                    seed=0,
                    finish=finish,
                    experts=Neighbours(ranks=neighbours, exchange=exchange_tokens),
                )

            return find_difference(config, cut_tiny, ALONE, cpu, neighbours=neighbours)

        return run_threads(2, rank)

    assert found(1.0) == [None, None]
    one, other = found(1.1)
    assert one is not None and one == other and one.off > 1e-3
