"""Which device a rank takes."""

from __future__ import annotations

import pytest

from harness.device.process_group import device_index
from harness.errors import UserError


def test_a_rank_takes_the_device_of_its_number_or_the_only_one_that_it_sees() -> None:
    assert [device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [device_index(rank, 1) for rank in range(4)] == [0] * 4  # as Slurm binds one device to each task
    with pytest.raises(UserError, match="local rank 2 has no device: 2 are visible"):
        device_index(2, 2)
