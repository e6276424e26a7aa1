"""What of an engine is not a tensor, and is carried from a run to the one that resumes it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from harness.deepspeed.engine import loss_scaling, set_loss_scaling
from harness.device.process_group import start
from harness.topology.env import LaunchEnv

OVERFLOWS = (False, True, False, False, False, True, True, False, False, False, False, True)


def optimizer(**settings: object) -> SimpleNamespace:
    """What the functions see of an fp16 optimizer: its scaler of the loss."""
    given = dict(init_scale=2**8, scale_window=3, delayed_shift=2, min_scale=1, consecutive_hysteresis=False)
    return SimpleNamespace(loss_scaler=DynamicLossScaler(**{**given, **settings}))


def scales(of: SimpleNamespace, overflows: tuple[bool, ...]) -> list[float]:
    seen = []
    for overflow in overflows:
        of.loss_scaler.update_scale(overflow)
        seen.append(of.loss_scaler.cur_scale)
    return seen


@pytest.fixture
def one_rank() -> Iterator[None]:
    """DeepSpeed's scaler asks for its rank before it speaks."""
    was_open = dist.is_initialized()
    start(LaunchEnv())
    yield
    if not was_open:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_scaler_goes_on_from_where_another_one_stood() -> None:
    whole = scales(optimizer(), OVERFLOWS)
    assert len(set(whole)) > 2
    for done in range(len(OVERFLOWS)):
        first, second = optimizer(), optimizer(init_scale=2**16)
        scales(first, OVERFLOWS[:done])
        set_loss_scaling(second, loss_scaling(first))
        assert scales(second, OVERFLOWS[done:]) == whole[done:]


def test_a_scale_that_is_fixed_is_the_runs_own() -> None:
    fixed = SimpleNamespace(loss_scaler=LossScaler(scale=128.0))
    assert loss_scaling(fixed) == loss_scaling(SimpleNamespace()) == {}
    set_loss_scaling(fixed, loss_scaling(optimizer()))
    assert fixed.loss_scaler.loss_scale == 128.0
