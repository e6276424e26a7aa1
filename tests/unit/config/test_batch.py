"""The arithmetic of the batch and of the pipeline's idle time, compared with DeepSpeed's own schedule."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from harness.config.values.batch import bubble, micro_batches_wanted


@pytest.mark.parametrize(
    ("stages", "micro_batches", "share"), [(1, 1, 0.0), (2, 8, 1 / 9), (4, 4, 3 / 7), (4, 1, 3 / 4)]
)
def test_bubble_is_the_share_of_the_step_spent_waiting(stages: int, micro_batches: int, share: float) -> None:
    assert bubble(stages, micro_batches) == pytest.approx(share)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 4), (4, 12)])
def test_bubble_matches_the_slots_of_deepspeeds_schedule(stages: int, micro_batches: int) -> None:
    steps = list(TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=0).steps())
    busy = sum(any(isinstance(c, (ForwardPass, BackwardPass)) for c in commands) for commands in steps)
    assert 1 - busy / len(steps) == pytest.approx(bubble(stages, micro_batches))


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_the_wanted_micro_batches_leave_a_fifth_idle(stages: int) -> None:
    wanted = micro_batches_wanted(stages)
    assert bubble(stages, wanted) == pytest.approx(1 / 5) and bubble(stages, wanted - 1) > 1 / 5


@pytest.mark.timeout(5)
def test_a_number_of_stages_that_cannot_be_takes_no_time() -> None:
    assert micro_batches_wanted(10**12 + 1) == 4 * 10**12
