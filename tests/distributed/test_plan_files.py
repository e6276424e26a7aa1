"""Every plan file, held to the uncut model: logits and every gradient, in the shapes of `tests.support.plan_models`.

Two ranks are launched for a quarter of the files, and two for the others; a file without a shape, or with one that is
refused, fails.
"""

from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from harness.errors import UserError
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.apply import cut
from harness.parallel.plans.plan import plan_for
from tests.support.comparing import Uncut, differences
from tests.support.plan_models import (
    ODD_SHAPES,
    ODD_SIZES,
    PLANS,
    REFUSED_ODD,
    SHAPES,
    VOCABULARY,
    plan_model,
)
from tests.support.ranks import here, inheriting, on_device, run_ranks

pytestmark = pytest.mark.ranks
TOLERANCE = 5e-6  # float32, sums in another order
SIZE = 2
MORE_THAN_HALF = "more than half"
TOLERATED = {MORE_THAN_HALF: 0.4}  # a plan that cuts little is worth nothing


@cache
def models(families: tuple[str, ...]) -> dict[str, list[tuple[Any, Uncut]]]:
    """The models of each family, and what they come to."""
    made = {family: [plan_model(family, shape).to(here()) for shape in SHAPES[family]] for family in families}
    return {family: [(model, Uncut.of(model, VOCABULARY)) for model in some] for family, some in made.items()}


@cache
def odd_models() -> dict[str, tuple[Any, Uncut | None]]:
    """A model of each family that ranks do not share equally, and what it comes to unless it is to be refused."""
    found: dict[str, tuple[Any, Uncut | None]] = {}
    for family, shapes in SHAPES.items():
        model = plan_model(family, ODD_SHAPES.get(family, shapes[0]), ODD_SIZES).to(here())
        found[family] = model, None if family in REFUSED_ODD else Uncut.of(model, VOCABULARY, aligned=False)
    return found


def compare(part: Any, uncut: Uncut) -> dict[str, float]:
    """The differences of the cut model; `MORE_THAN_HALF`: by how much a rank holds more than its half of the whole."""
    group = dist.group.WORLD
    whole = sum(param.numel() for param in part.parameters())
    cut(part, "", plan_for(part, PLANS), TensorParallel.of(group), part.config)
    held = sum(param.numel() for param in part.parameters()) / whole
    return {MORE_THAN_HALF: held - 1 / SIZE, **differences(uncut, part, group, VOCABULARY)}


@inheriting(models)
@on_device
def run_shapes(families: tuple[str, ...]) -> dict[str, list[dict[str, float]]]:
    """What every rank does."""
    return {family: [compare(*each) for each in some] for family, some in models(families).items()}


@inheriting(odd_models)
@on_device
def run_odd_shapes() -> dict[str, dict[str, float] | str]:
    """What every rank does with shares that are not equal: differences, or why a family was refused."""
    found: dict[str, dict[str, float] | str] = {}
    for family, (part, uncut) in odd_models().items():
        try:
            cut(part, "", plan_for(part, PLANS), TensorParallel.of(dist.group.WORLD), part.config)
        except UserError as error:
            found[family] = str(error)
            continue
        assert uncut is not None, f"{family} is not refused"
        found[family] = differences(uncut, part, dist.group.WORLD, VOCABULARY)
    return found


@pytest.mark.thorough
def test_shares_that_are_not_equal_give_the_model_too() -> None:
    for rank, result in enumerate(run_ranks(3, run_odd_shapes, timeout_s=300)):
        assert {family for family, found in result.items() if isinstance(found, str)} == REFUSED_ODD
        for family, errors in result.items():
            if not isinstance(errors, str):
                wrong = {what: error for what, error in errors.items() if not error <= 2 * TOLERANCE}
                assert not wrong, f"{family} on rank {rank}: {wrong}"


FILES = tuple(sorted(path.stem for path in PLANS.glob("*.json")))
FIRST = FILES[::4]
OTHERS = tuple(name for name in FILES if name not in FIRST)


@pytest.mark.thorough
@pytest.mark.parametrize("files", [FIRST, OTHERS], ids=["first", "others"])
def test_a_model_cut_by_a_plan_file_is_the_model(files: tuple[str, ...]) -> None:
    assert [name for name in files if not SHAPES.get(name)] == [], "without a shape in tests/support/plan_models.py"
    for rank, result in enumerate(run_ranks(SIZE, run_shapes, files, timeout_s=300)):
        for name in files:
            for shape, errors in zip(SHAPES[name], result[name], strict=True):
                wrong = {what: error for what, error in errors.items() if not error <= TOLERATED.get(what, TOLERANCE)}
                assert not wrong, f"{name} {shape} on rank {rank}: {wrong}"
