"""What a rank sees of values that are not finite, and on which stage they are said to have started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.parallel.pipeline.staged_module import FiniteWatch
from harness.training.engine.engine import Evidence
from harness.training.engine.losses import GuardedLoss, MeanLoss, targets
from harness.training.engine.nonfinite import origin

NAN = float("nan")


def seen(*given: tuple[int, int, dict[str, bool]]) -> list[Evidence]:
    return [Evidence(rank=rank, stage=stage, **{"loss": True, **flags}) for rank, stage, flags in given]


@pytest.mark.parametrize(
    ("given", "loss", "wanted"),
    [
        # forward: the first stage that handed on what is not finite, and of its ranks those that did
        ([(0, 0, {}), (1, 1, {"outputs": False}), (2, 2, {"outputs": False})], True, "first on stage 1, rank 1"),
        ([(0, 0, {}), (1, 0, {"outputs": False}), (2, 1, {"loss": False})], True, "first on stage 0, rank 1"),
        # no stage did: the last one, whose loss it is
        ([(0, 0, {}), (1, 1, {"loss": False}), (2, 1, {})], True, "first on stage 1, rank 1"),
        ([(0, 0, {}), (1, 0, {})], True, "first on stage 0, ranks 0-1"),
        # backward: the lowest stage that got finite gradients made others of them
        ([(0, 0, {"gradients": False}), (1, 1, {}), (2, 2, {})], False, "first on stage 1, rank 1"),
        ([(0, 0, {"gradients": False}), (1, 1, {"gradients": False}), (2, 2, {})], False, "first on stage 2, rank 2"),
        ([(0, 0, {}), (1, 0, {}), (2, 1, {}), (3, 1, {})], False, "first on stage 0, ranks 0-1"),
    ],
)
def test_the_stage_is_named_where_it_started(given: Any, loss: bool, wanted: str) -> None:
    assert origin(seen(*given), loss=loss) == wanted


@pytest.mark.parametrize(("spoils", "gradient_is_finite"), [(False, True), (True, False)])
def test_a_loss_remembers_what_was_not_finite_and_can_spoil_its_gradient(
    spoils: bool, gradient_is_finite: bool
) -> None:
    """The infinite part is a constant, so that only the hook can make the gradient anything but finite."""
    guarded = GuardedLoss(MeanLoss(lambda outputs, labels: outputs.sum() + labels.sum()), spoils=spoils)
    assert guarded.finite
    outputs = torch.ones(2, 1, requires_grad=True)
    guarded(outputs, targets(torch.zeros(2, 1), 1.0, 2)).backward()
    assert guarded.finite and bool(outputs.grad.isfinite().all())  # type: ignore[union-attr]
    guarded(outputs, targets(torch.full((2, 1), float("inf")), 1.0, 2)).backward()
    assert bool(outputs.grad.isfinite().all()) is gradient_is_finite  # type: ignore[union-attr]
    guarded(outputs, targets(torch.zeros(2, 1), 1.0, 2))  # what is finite later changes nothing
    assert not guarded.finite
    guarded.reset()
    assert guarded.finite


def test_an_observer_sees_outputs_and_an_evaluation_is_judged_by_itself() -> None:
    events: list[str] = []
    guarded = GuardedLoss(MeanLoss(torch.nn.functional.mse_loss), spoils=False)
    guarded.observer = lambda outputs, targets: events.append("seen")
    with torch.no_grad():
        guarded(torch.full((2, 1), NAN), targets(torch.zeros(2, 1), 1.0, 2))
    assert events == ["seen"] and guarded.finite


def test_a_stage_watches_its_outputs_and_the_gradients_that_come_back() -> None:
    watch = FiniteWatch()
    assert watch.outputs and watch.gradients  # nothing seen yet
    x = torch.ones(3, requires_grad=True)
    watch.see((x * 2, torch.arange(3), x.detach()))
    (x * 2).sum().backward()
    assert watch.outputs and watch.gradients
    out = x * 2
    watch.see(out)
    out.backward(torch.tensor([1.0, NAN, 1.0]))
    assert watch.outputs and not watch.gradients
    watch.see((x * 1, x * float("inf")))
    watch.see(x * 1)  # what is finite later changes nothing
    assert not watch.outputs
    watch.reset()
    assert watch.outputs and watch.gradients
    with torch.no_grad():
        watch.see(x * NAN)
    assert watch.outputs
