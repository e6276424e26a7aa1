"""Adapters on every linear layer and expert of whole models that are cut by their plans: logits and every gradient.

Two ranks are launched once; the shapes are those of the plans' own tests.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model

from harness.config.errors import UserError
from harness.parallel.adapters import cut_with_adapters
from harness.parallel.comm import TensorParallel
from harness.parallel.plan import plan_for
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parallel_models import CASES, VOCABULARY, tiny, whole_grads
from tests.plan_models import PLANS, SHAPES, plan_model

pytestmark = pytest.mark.ranks
TOLERANCE = 1e-5  # float32, sums in another order


def compare(model: Any) -> str | float:
    """The largest difference, relative to the whole model's largest value of its kind; or why there is none."""
    group = dist.group.WORLD
    plan = plan_for(model, PLANS)
    try:
        inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules="all-linear"), model)
    except ValueError as error:
        return str(error)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_" in name:
                param.normal_(std=0.1)
    part = copy.deepcopy(model)
    try:
        cut_with_adapters(part, plan, TensorParallel.of(group), part.config)
    except UserError as error:
        return str(error)
    ids, labels = torch.randint(VOCABULARY, (2, 2, 13), generator=torch.Generator().manual_seed(1))
    logits, got = (m(input_ids=ids, use_cache=False).logits for m in (model, part))
    for each in (logits, got):
        F.cross_entropy(each.flatten(0, 1), labels.flatten()).backward()
    wanted = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    grads = whole_grads(part, group)
    if grads.keys() != wanted.keys():
        return f"other gradients: {sorted(grads.keys() ^ wanted.keys())[:3]}"
    scale = max(grad.abs().max() for grad in wanted.values())
    errors = [(got - logits).abs().max() / logits.abs().max()]
    errors += [(grads[n] - g).abs().max() / g.abs().max().clamp_min(scale / 100) for n, g in wanted.items()]
    return float(torch.stack(errors).nan_to_num(float("inf")).max())


def run_cases() -> dict[str, str | float]:
    """What every rank does."""
    found = {case: compare(tiny(case)) for case in CASES}
    for family, shapes in SHAPES.items():
        found |= {f"{family} {index}": compare(plan_model(family, shape)) for index, shape in enumerate(shapes)}
    return found


def test_adapters_follow_every_plan() -> None:
    results = run_ranks(2, run_cases, timeout_s=400)
    wrong = []
    for case in results[0]:
        for found in (result[case] for result in results):
            refused_by_peft = isinstance(found, str) and "incompatible with Mamba" in found
            if not refused_by_peft and (isinstance(found, str) or found > TOLERANCE):
                wrong.append(f"{case}: {found}")
    assert not wrong
