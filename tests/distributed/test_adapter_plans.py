"""Adapters on every linear layer and expert of whole models that are cut by their plans: logits and every gradient.

Where peft has DoRA they have magnitudes, too. Two ranks are launched once; the shapes are the first of those of the
plans' own tests.
"""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model

from harness.errors import UserError
from harness.extras.dora import own_magnitudes
from harness.extras.lora_cut import cut_with_adapters
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.plan import plan_for
from tests.distributed.test_parallel_models import VOCABULARY
from tests.support.comparing import Uncut, differences
from tests.support.plan_models import PLANS, SHAPES, plan_model
from tests.support.ranks import inheriting, on_device, run_ranks

pytestmark = pytest.mark.ranks
TOLERANCE = 1e-5  # float32, sums in another order


@cache
def adapted() -> dict[str, tuple[Any, Any, Uncut] | str]:
    """The model of each family with adapters, its plan, and what it comes to; or why it takes none."""
    return {family: with_adapters(plan_model(family, shapes[0])) for family, shapes in SHAPES.items()}


def with_adapters(model: Any) -> tuple[Any, Any, Uncut] | str:
    plan = plan_for(model, PLANS)
    has_experts = any("experts" in name for name, _ in model.named_parameters())  # for which peft has no DoRA
    lora = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", use_dora=not has_experts)
    try:
        inject_adapter_in_model(lora, model)
    except ValueError as error:
        return str(error)
    own_magnitudes(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_magnitude_vector" in name:  # near zero they would leave a gradient to rounding
                param.mul_(1 + 0.1 * torch.randn_like(param))
            elif ".lora_" in name:
                param.normal_(std=0.1)
    return model, plan, Uncut.of(model, VOCABULARY)


def compare(part: Any, plan: Any, uncut: Uncut) -> str | dict[str, float]:
    """The differences of the cut model from the whole one, or why it was not cut."""
    group = dist.group.WORLD
    try:
        cut_with_adapters(part, plan, TensorParallel.of(group), part.config)
    except UserError as error:
        return str(error)
    return differences(uncut, part, group, VOCABULARY)


@inheriting(adapted)
@on_device
def run_cases() -> dict[str, str | dict[str, float]]:
    """What every rank does."""
    return {family: each if isinstance(each, str) else compare(*each) for family, each in adapted().items()}


@pytest.mark.thorough
def test_adapters_follow_every_plan() -> None:
    results = run_ranks(2, run_cases, timeout_s=400)
    wrong = []
    for case in results[0]:
        for found in (result[case] for result in results):
            if isinstance(found, str):
                refused_by_peft = "incompatible with Mamba" in found
                wrong += [] if refused_by_peft else [f"{case}: {found}"]
            else:
                off = {what: error for what, error in found.items() if not error <= TOLERANCE}
                wrong += [f"{case}: {off}"] if off else []
    assert not wrong
