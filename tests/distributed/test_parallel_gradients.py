"""Partial gradients that a plan forgets are found from the graph and summed; wrong plans are refused.

Two ranks are launched once.
"""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.parallel.comm import TensorParallel
from harness.parallel.plans.apply import cut
from harness.parallel.plans.plan import Plan, PlanRule, wildcard
from harness.parallel.tensor.shared_input import SharedInput
from tests.support.cut_layers import TOLERANCE, Errors, compare
from tests.support.ranks import on_device, run_ranks
from tests.support.workers import refusal_of

pytestmark = pytest.mark.ranks
IN, OUT, TOKENS = 9, 14, (2, 5)
PLAN = Plan(model_type="any", rules={"up": PlanRule(style="colwise"), "down": PlanRule(style="rowwise")})


class Scaled(nn.Module):
    """A block whose split middle is scaled by a parameter that no plan names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(IN, OUT), nn.Parameter(torch.randn(1)), nn.Linear(OUT, IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale)


class Checkpointed(nn.Module):
    """A module that is run again in the backward."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


def forgotten_parameter(group: dist.ProcessGroup, wrap: Callable[[nn.Module], nn.Module]) -> Errors:
    whole = Scaled()
    part = copy.deepcopy(whole)
    cut(part, "", PLAN, TensorParallel.of(group), None)
    return compare(wrap(whole), wrap(part), torch.randn(*TOKENS, IN), group)


class Twice(nn.Module):
    """One scale for the whole input of a split block and for its split middle."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.up, self.down = nn.Linear(IN, OUT), nn.Linear(OUT, IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * self.scale) * self.scale)


class Leaking(nn.Module):
    """A split middle that takes in the whole input once more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, OUT), nn.Linear(OUT, IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * x.mean())


class Bypassed(nn.Module):
    """A block that uses the weight of its last layer without the layer, as fused kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, OUT), nn.Linear(OUT, IN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) @ self.down.weight.t()


def refusals(group: dist.ProcessGroup) -> list[str]:
    """What cut, or the first forward, says of plans that would give wrong gradients."""
    said = []
    for module, styles in (
        (Twice(), {"up": "colwise", "down": "rowwise"}),
        (Leaking(), {"up": "colwise", "down": "rowwise"}),
        (Bypassed(), {"up": "colwise", "down": "rowwise"}),
        (nn.Sequential(nn.Linear(IN, OUT)), {"0": "all_reduce"}),
    ):
        plan = Plan(model_type="any", rules={wildcard(name): PlanRule(style=style) for name, style in styles.items()})

        def cut_and_run(module: nn.Module = module, plan: Plan = plan) -> None:
            cut(module, "", plan, TensorParallel.of(group), None)
            module(torch.randn(*TOKENS, IN, requires_grad=True))

        said.append(refusal_of(cut_and_run))
    return said


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": nn.Sequential,
    "in a checkpoint": lambda block: Checkpointed(block, use_reentrant=False),
    "in a reentrant checkpoint": lambda block: Checkpointed(block, use_reentrant=True),
}


def inputs_kept(group: dist.ProcessGroup) -> int:
    """Inputs of split layers that were computed again and are kept until Python's collector comes: with
    `use_reentrant=False` nothing goes backward through them."""
    block = Scaled()
    cut(block, "", PLAN, TensorParallel.of(group), None)
    gc.disable()
    try:
        for use_reentrant in (False, True):
            again, x = Checkpointed(block, use_reentrant), torch.randn(*TOKENS, IN, requires_grad=True)
            again(again(x)).sum().backward()
        return sum(bool(each.tensors) for each in gc.get_objects() if isinstance(each, SharedInput))
    finally:
        gc.enable()


@on_device
def run_cases() -> tuple[dict[str, Errors], list[str], int]:
    """What every rank does."""
    group = dist.group.WORLD
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    return (
        {name: forgotten_parameter(group, wrap) for name, wrap in WRAPPERS.items()},
        refusals(group),
        inputs_kept(group),
    )


@pytest.fixture(scope="module")
def results() -> Any:
    return run_ranks(2, run_cases)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_parameter_between_split_layers_gets_its_whole_gradient(results: Any, wrapper: str) -> None:
    for errors, *_ in results:
        assert any(what.endswith("scale gradient") for what in errors[wrapper])
        assert {what: error for what, error in errors[wrapper].items() if not error <= TOLERANCE} == {}


def test_a_plan_that_would_give_wrong_gradients_is_refused(results: Any) -> None:
    end = " used by split and by whole layers: set tensor_parallel.autotp_size to 1, or correct the plan"
    for _, said, _ in results:
        assert said == [
            f"the tensor-parallel plan of Twice gives wrong gradients: scale is{end}",
            f"the tensor-parallel plan of Leaking gives wrong gradients: its input is{end}",
            f"the tensor-parallel plan of Bypassed gives wrong gradients: down.weight, up.bias, up.weight is{end}",
            "the tensor-parallel style all_reduce needs a module that is split, but 0 is whole: "
            "set tensor_parallel.autotp_size to 1",
        ]


def test_layers_that_are_computed_again_keep_no_inputs(results: Any) -> None:
    assert [kept for *_, kept in results] == [0, 0]
