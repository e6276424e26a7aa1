"""Every element of a tensor is in one part, wherever the parts' borders fall."""

from __future__ import annotations

from math import prod

import pytest
import torch

from harness.parallel.zero import Zero3Partition


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (3, 5), (2, 3, 5), (3, 1, 4, 2), (1, 7), (0, 3)])
def test_a_part_is_a_run_of_elements(shape, count):
    size = -(-prod(shape) // count)
    for index in range(count):
        taken = torch.zeros(shape)
        for box in Zero3Partition(index=index, count=count).boxes(shape):
            taken[box] += 1
        wanted = torch.zeros(prod(shape))
        wanted[index * size : (index + 1) * size] = 1
        assert torch.equal(taken.flatten(), wanted)


def test_a_part_is_few_boxes():
    row_ends, rows = [(2, 666, slice(7, 10)), (2, slice(667, 1000))], [(slice(3, 5),)]
    row_starts = [(5, slice(0, 333)), (5, 333, slice(0, 4))]
    assert list(Zero3Partition(index=1, count=3).boxes((8, 1000, 10))) == row_ends + rows + row_starts
