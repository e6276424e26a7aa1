"""A module that changes its input in place, under the backward hook that ZeRO-3 gives to every module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.parallel.zero import copy_hooked_inputs


class Router(nn.Module):
    """Multiplies what it is given in place, as router jitter does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        x *= 0.5 if scale is None else scale
        return x * self.weight


def hooked() -> tuple[nn.Sequential, nn.Linear]:
    first = nn.Linear(2, 2)
    model = nn.Sequential(first, Router())
    for module in model:
        module.register_full_backward_hook(lambda *_: None)
    return model, first


def test_a_hooked_input_may_be_changed_in_place_with_the_gradients_of_the_formula() -> None:
    x = torch.tensor([[1.0, -1.0]])
    with pytest.raises(RuntimeError, match=r"BackwardHookFunction\w* is a view and is being modified inplace"):
        hooked()[0](x)
    model, first = hooked()
    copy_hooked_inputs(model)
    output = model(x)
    assert torch.equal(output, first(x) * 0.5 * model[1].weight)
    output.sum().backward()
    assert torch.equal(first.bias.grad, torch.tensor([1.0, 1.5]))
    assert type(first).forward is nn.Linear.forward and "forward" not in vars(first)  # torch's own are left out


def test_what_no_hook_has_made_is_not_copied() -> None:
    model = nn.Sequential(Router())
    copy_hooked_inputs(model)
    x = torch.ones(2)
    assert torch.equal(model[0](x, scale=torch.tensor(4.0)), torch.tensor([8.0, 12.0]))
    assert torch.equal(x, torch.full((2,), 4.0))
