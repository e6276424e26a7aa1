"""The state of an optimizer that is made from what another one of its kind had: both step on to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from torch import nn
from torch.optim import SGD, Adadelta, Adafactor, Adam, AdamW, NAdam, Optimizer, RMSprop

from harness.deepspeed.flat_tensors import WholeParameter, updated_tensors
from harness.deepspeed.optimizer_states import StateTemplate, counters_of, make_state, stored_names, template
from harness.errors import UserError
from harness.training.engine.optimizer import LateAdagrad

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Adam": partial(Adam, amsgrad=True),
    "AdamW": AdamW,
    "SGD": partial(SGD, momentum=0.9),
    "plain SGD": SGD,
    "Adagrad": LateAdagrad,
    "Adadelta": Adadelta,
    "NAdam": NAdam,
    "RMSprop": partial(RMSprop, momentum=0.5),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def step(module: nn.Module, optimizer: Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    module(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def carry_over(old: Optimizer, new: Optimizer) -> None:
    """Give `new`, which has not stepped, the state of `old`, by way of names, values and counters."""
    for theirs, ours in zip(updated_tensors(old), updated_tensors(new), strict=True):
        found = template(old, theirs)
        make_state(new, ours, template(new, ours), counters_of(old, theirs, found))
        for name in found.elements:
            new.state[ours.tensor][name].copy_(old.state[theirs.tensor][name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_the_state_of_another(name: str) -> None:
    first, second = model(), model()
    old, new = (OPTIMIZERS[name](module.parameters(), lr=0.01) for module in (first, second))
    for seed in range(3):
        step(first, old, seed)
    second.load_state_dict(first.state_dict())
    carry_over(old, new)
    for seed in range(3, 6):
        step(first, old, seed)
        step(second, new, seed)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_asking_what_is_kept_changes_nothing() -> None:
    module = model()
    optimizer = AdamW(module.parameters(), lr=0.01)
    step(module, optimizer, 0)
    before = [parameter.clone() for parameter in module.parameters()]
    kept = {id(p): dict(state) for p, state in optimizer.state.items()}
    hooks: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
    optimizer.register_step_post_hook(lambda *_: hooks.append("after"))
    found = template(optimizer, next(updated_tensors(optimizer)))
    assert not hooks  # they take a step for one of the run's
    assert found.elements == {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    assert list(found.counters) == ["step"]
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert {id(p): dict(state) for p, state in optimizer.state.items()} == kept


def test_state_that_is_not_one_value_for_each_weight_is_refused() -> None:
    optimizer = Adafactor([nn.Parameter(torch.zeros(4, 4))])
    with pytest.raises(UserError, match="Adafactor keeps row_var, which does not have one value for each weight"):
        template(optimizer, WholeParameter(optimizer.param_groups[0]["params"][0]))


def test_a_checkpoint_has_torchs_names_of_states() -> None:
    ours = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(2))])
    of_deepspeed = object.__new__(DeepSpeedCPUAdagrad)  # its constructor would compile
    assert stored_names(of_deepspeed, StateTemplate(elements={"exp_avg_sq": torch.float32})) == {"sum": "exp_avg_sq"}
    assert stored_names(ours, StateTemplate(elements={"sum": torch.float32})) == {"sum": "sum"}
