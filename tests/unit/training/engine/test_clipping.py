"""The exact gradient norm: summed in float64, every parameter counted by one rank, whatever holds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness import Trainer, TrainingArguments
from harness.deepspeed.gradient_norm import BLOCK, counts, global_norm, square_sum
from harness.deepspeed.update import clip
from harness.topology.groups import Groups, build_groups
from harness.topology.layout import Layout

CPU = torch.device("cpu")


def parameter(*gradient: float, **marks: bool) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(len(gradient)))
    made.grad = torch.tensor(gradient)
    for name, value in marks.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_squares_of_many_elements_are_summed_without_loss(kind: torch.dtype) -> None:
    tensors = [torch.full((BLOCK + 3,), 0.1, dtype=kind), torch.full((2, BLOCK), 3e-5, dtype=kind), torch.zeros(0)]
    wanted = sum(tensor.numel() * float(tensor.reshape(-1)[0]) ** 2 for tensor in tensors[:2])
    found = square_sum(tensors, CPU)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(wanted, rel=1e-10)


class Counting(TorchDispatchMode):
    """Counts operations that are no views."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += not func.is_view
        return func(*args, **(kwargs or {}))


def test_the_norm_and_the_clipping_of_many_gradients_are_a_few_calls() -> None:
    gradients = [torch.ones(7, index + 1) for index in range(147)]
    with Counting() as counting:
        clip(gradients, square_sum(gradients, CPU).sqrt(), 1.0)
    assert counting.calls < 20


def test_nothing_has_the_norm_zero_and_what_is_not_finite_shows() -> None:
    assert square_sum([], CPU).item() == 0.0
    assert square_sum([torch.tensor([1.0, float("inf")])], CPU).isinf()
    assert square_sum([torch.tensor([1.0, float("nan")])], CPU).isnan()
    assert square_sum([torch.full((2,), 3e30)], CPU).item() == pytest.approx(1.8e61)  # no overflow in between


def test_memory_order_changes_nothing() -> None:
    matrix = torch.arange(6.0).view(2, 3).t()
    assert square_sum([matrix], CPU).item() == 55.0


def norm_of(parameters: list[nn.Parameter], groups: Groups) -> float:
    counted = [p.grad for p in parameters if p.grad is not None and counts(p, groups.coordinate.tp_rank)]
    return global_norm(counted, [], groups, CPU).item()


def test_a_tied_parameter_is_not_counted_again() -> None:
    groups = build_groups(Layout())
    assert norm_of([parameter(3.0), parameter(4.0), parameter(100.0, ds_pipe_replicated=True)], groups) == 5.0


def test_the_other_tensor_parallel_ranks_count_only_their_own_shards() -> None:
    groups = build_groups(Layout())
    second = replace(groups, coordinate=replace(groups.coordinate, tp_rank=1))
    parameters = [parameter(3.0), parameter(6.0, 8.0, tensor_model_parallel=True)]
    assert norm_of(parameters, second) == 10.0
    assert norm_of(parameters, groups) == pytest.approx((9 + 100) ** 0.5)


@pytest.mark.parametrize(
    ("limit", "loss_scale", "wanted"),
    [(0.0, 1.0, [3.0, 4.0]), (10.0, 1.0, [3.0, 4.0]), (1.0, 1.0, [0.6, 0.8]), (1.0, 5.0, [0.6, 0.8])],
    ids=["no limit", "below it", "above it", "a scaled loss"],
)
def test_gradients_of_every_kind_are_clipped_alike(limit: float, loss_scale: float, wanted: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):  # of ZeRO's norms, and of the exact one
        gradients = [torch.tensor([3.0]) * loss_scale, torch.tensor([4.0]) * loss_scale]
        clip(gradients, torch.tensor(5.0, dtype=dtype) * loss_scale, limit, loss_scale)
        assert torch.cat(gradients).tolist() == pytest.approx(wanted, rel=1e-5)


def test_a_norm_of_nan_makes_gradients_nan_and_no_gradients_are_no_error() -> None:
    gradient = torch.ones(2)
    clip([gradient], torch.tensor(float("nan")), 1.0)
    assert gradient.isnan().all()
    clip([], torch.tensor(1.0), 1.0)


@pytest.mark.parametrize(("limit", "scale"), [(0.0, 1.0), (10.0, 1.0), (1.0, 0.2)])
def test_a_step_clips_to_its_limit_and_reports_the_norm_before(limit: float, scale: float, tmp_path: Path) -> None:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    config = {"train_batch_size": 1, "gradient_clipping": limit, "zero_optimization": {"stage": 0}, "optimizer": sgd}
    constant: Any = {"max_steps": 1, "save_steps": 0, "lr_scheduler_type": "constant", "learning_rate": 1.0}
    arguments = TrainingArguments(deepspeed_config=config, output_dir=str(tmp_path), max_grad_norm=limit, **constant)
    data = [(torch.tensor([3.0, 4.0]), torch.zeros(1))]
    trainer = Trainer([layer], arguments, data, loss_fn=lambda outputs, labels: outputs.sum())
    record = trainer.training_step()
    (weight,) = (p.detach().clone() for p in trainer.run.module.parameters())
    trainer.close()
    assert record.grad_norm == pytest.approx(5.0)
    torch.testing.assert_close(weight, -scale * torch.tensor([[3.0, 4.0]]), rtol=1e-5, atol=0)
