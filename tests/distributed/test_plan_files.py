"""Every plan file, held to the uncut model: logits and every gradient, in the shapes of `tests.plan_models`.

Two ranks are launched once; a file without a shape, or with one that is refused, fails.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from harness.parallel.apply import cut
from harness.parallel.comm import TensorParallel
from harness.parallel.plan import plan_for
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parallel_models import whole_grads
from tests.plan_models import PLANS, SHAPES, VOCABULARY, plan_model

pytestmark = pytest.mark.ranks
TOLERANCE = 5e-6  # float32, sums in another order
SIZE = 2
MORE_THAN_HALF = "more than half"
TOLERATED = {MORE_THAN_HALF: 0.4}  # a plan that cuts little is worth nothing


def compare(family: str, shape: dict[str, Any]) -> dict[str, float]:
    """The largest differences, each relative to the uncut model's largest value of its kind; that of a gradient which
    only one of them has is infinite. `MORE_THAN_HALF`: by how much a rank holds more than its half of the model."""
    group = dist.group.WORLD
    model = plan_model(family, shape)
    part = copy.deepcopy(model)
    whole = sum(param.numel() for param in part.parameters())
    cut(part, "", plan_for(part, PLANS), TensorParallel.of(group), part.config)
    ids, labels = torch.randint(VOCABULARY, (2, 2, 13), generator=torch.Generator().manual_seed(1))
    logits, got = (m(input_ids=ids, use_cache=False).logits for m in (model, part))
    for each in (logits, got):
        F.cross_entropy(each.flatten(0, 1), labels.flatten()).backward()
    wanted = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    grads = whole_grads(part, group)
    scale = max(grad.abs().max() for grad in wanted.values())
    held = sum(param.numel() for param in part.parameters()) / whole
    errors = {MORE_THAN_HALF: held - 1 / SIZE, "logits": ((got - logits).abs().max() / logits.abs().max()).item()}
    errors |= {name: float("inf") for name in grads.keys() ^ wanted.keys()}
    # The gradient of a key's bias is zero but for rounding: hence a floor under what it is compared with.
    for name in grads.keys() & wanted.keys():
        difference, largest = (grads[name] - wanted[name]).abs().max(), wanted[name].abs().max()
        errors[name] = (difference / largest.clamp_min(scale / 100)).item()
    return errors


def run_shapes() -> dict[str, list[dict[str, float]]]:
    """What every rank does."""
    return {family: [compare(family, shape) for shape in shapes] for family, shapes in SHAPES.items()}


@pytest.fixture(scope="module")
def results() -> Any:
    return run_ranks(SIZE, run_shapes, timeout_s=300)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.json")), ids=lambda path: path.stem)
def test_a_model_cut_by_a_plan_file_is_the_model(results: Any, path: Any) -> None:
    for rank, result in enumerate(results):
        assert result.get(path.stem), f"{path.name} has no shape in tests/plan_models.py"
        for shape, errors in zip(SHAPES[path.stem], result[path.stem], strict=True):
            wrong = {what: error for what, error in errors.items() if not error <= TOLERATED.get(what, TOLERANCE)}
            assert not wrong, f"{path.stem} {shape} on rank {rank}: {wrong}"
