"""What stages are estimated to take, and what a step of the pipeline takes."""

from __future__ import annotations

import pytest

from harness.profile.timeline import pipeline_seconds
from harness.training.rebalancing.rebalancer import corrected


def test_estimates_add_up_to_what_was_measured_and_keep_their_proportions() -> None:
    assert corrected([1, 3, 2, 2], [0, 2, 4], [8.0, 2.0]) == [2.0, 6.0, 1.0, 1.0]


@pytest.mark.parametrize(("micro_batches", "seconds"), [(1, 6.0), (4, 15.0)])
def test_a_step_takes_all_stages_once_and_the_slowest_for_every_other_micro_batch(micro_batches, seconds) -> None:
    assert pipeline_seconds([1.0, 2.0, 3.0], micro_batches) == seconds
