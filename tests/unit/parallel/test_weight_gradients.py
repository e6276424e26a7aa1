"""Weight gradients that are put off are those that come at once, to the last bit, and reach their parameters alike."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from harness.context_parallel.tiles import tile_block
from harness.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from harness.parallel.weight_gradients import DeferredGradients, attach

MICRO_BATCHES = 3


class Twice(nn.Module):
    """A layer that is called twice, and one whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.scaled = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.shared(x).tanh())
        return nn.functional.linear(x, self.scaled.weight * self.scale, self.scaled.bias)


def layers() -> nn.Sequential:
    """Layers of every kind that is put off, between others."""
    torch.manual_seed(0)
    whole = nn.Linear(16, 12)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.GELU(),
        ColumnParallelLinear.from_linear(whole, None),
        nn.LayerNorm(12),
        RowParallelLinear.from_linear(nn.Linear(12, 12, bias=False), None),
        Conv1D(16, 12),
        ColumnParallelLinear.from_linear(Conv1D(8, 16), None, weight_transposed=True),
        Twice(),
    )


def gradients(module: nn.Module, recompute: str, later: DeferredGradients | None = None) -> list[Tensor | None]:
    """The gradients of inputs and parameters after some micro-batches."""
    torch.manual_seed(1)
    inputs = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(MICRO_BATCHES)]
    for x in inputs:
        with nullcontext() if later is None else later.defer():
            y = checkpoint(module, x, use_reentrant=recompute == "reentrant") if recompute else module(x)
            y.pow(2).sum().backward()
    for _ in inputs if later is not None else ():
        later.compute()
    return [each.grad for each in (*inputs, *module.parameters())]


@pytest.mark.parametrize("tile", [0, 2])
@pytest.mark.parametrize("recompute", ["", "reentrant", "without reentry"])
def test_what_is_put_off_is_the_same_to_the_last_bit(recompute: str, tile: int) -> None:
    whole, put_off = layers(), layers()
    for module in (whole, put_off) if tile else ():
        tile_block(module, tile)
    put_off[0].weight.requires_grad = whole[0].weight.requires_grad = False  # a frozen weight has no gradient
    later = DeferredGradients()
    attach(put_off, later)
    expected, got = gradients(whole, recompute), gradients(put_off, recompute, later)
    assert sum(each is not None for each in expected) == len(expected) - 1
    for a, b in zip(expected, got, strict=True):
        assert a is b is None or (a is not None and b is not None and torch.equal(a, b))


def test_it_comes_with_the_weight_gradients_and_not_before() -> None:
    module, later = nn.Linear(4, 3), DeferredGradients()
    attach(module, later)
    with later.defer():
        module(torch.ones(2, 4)).sum().backward()
    assert module.weight.grad is None and module.bias.grad is not None
    later.compute()
    assert torch.equal(module.weight.grad, torch.full((3, 4), 2.0))
    module(torch.ones(2, 4)).sum().backward()  # outside of `put_off` it comes at once
    assert torch.equal(module.weight.grad, torch.full((3, 4), 4.0))


def test_the_hooks_of_a_parameter_act_once() -> None:
    module, later, accumulated = nn.Linear(4, 3, bias=False), DeferredGradients(), []
    attach(module, later)
    module.weight.register_hook(lambda grad: None if grad is None else grad * 10)
    module.weight.register_post_accumulate_grad_hook(lambda weight: accumulated.append(weight.grad is not None))
    with later.defer():
        module(torch.ones(2, 4)).sum().backward()
    later.compute()
    assert torch.equal(module.weight.grad, torch.full((3, 4), 20.0)) and accumulated == [False, True]


def test_autocast_and_evaluation_keep_torchs_own_linear() -> None:
    module, later = nn.Linear(4, 3), DeferredGradients()
    plain = copy.deepcopy(module)
    attach(module, later)
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(module(x), plain(x)) and module(x).grad_fn is None
    with torch.autocast("cpu", dtype=torch.bfloat16), later.defer():
        module(x).float().sum().backward()
        plain(x).float().sum().backward()
    assert module.weight.grad is not None and torch.equal(module.weight.grad, plain.weight.grad)
