"""What stages are estimated to take, and what a step of the pipeline takes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from harness.config.values.step_time import pipeline_seconds
from harness.extras.rebalancing.rebalancer import corrected


def test_estimates_add_up_to_what_was_measured_and_keep_their_proportions() -> None:
    assert corrected([1, 3, 2, 2], [0, 2, 4], [8.0, 2.0]) == [2.0, 6.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("costs", "boundaries", "stages"),
    [
        pytest.param([0, 0, 5], [0, 2, 3], [4.0, 1.0], id="a-stage-that-is-estimated-at-nothing"),
        pytest.param([1e-12, 1e12], [0, 1, 2], [3.0, 3.0], id="far-apart"),
        pytest.param([7], [0, 1], [2.5], id="one-layer"),
        pytest.param([1, 2, 3, 4], [0, 1, 2, 4], [1.0, 0.0, 5.0], id="a-stage-that-took-no-time"),
    ],
)
def test_layers_of_a_stage_take_together_what_it_took(
    costs: list[float], boundaries: list[int], stages: list[float]
) -> None:
    found = corrected(costs, boundaries, stages)
    assert len(found) == len(costs) and min(found) >= 0
    sums = [sum(found[start:stop]) for start, stop in pairwise(boundaries)]
    assert sums == pytest.approx(stages)


@pytest.mark.parametrize(("micro_batches", "seconds"), [(1, 6.0), (4, 15.0)])
def test_a_step_takes_all_stages_once_and_the_slowest_for_every_other_micro_batch(micro_batches, seconds) -> None:
    assert pipeline_seconds([1.0, 2.0, 3.0], micro_batches) == seconds
