"""Tensors that are brought to the host, of a source that makes each when it is asked for."""

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.parallel.host import brought_to_host, reading


def test_a_tensor_on_the_host_is_yielded_before_the_next_is_made() -> None:
    made: list[int] = []

    def tensors() -> Iterator[tuple[int, Tensor]]:
        for index in range(3):
            made.append(index)
            yield index, torch.full((2,), float(index))

    for key, tensor in brought_to_host(tensors()):
        assert made == list(range(key + 1)) and tensor.tolist() == [key, key]
    assert made == [0, 1, 2]


def test_numbers_are_those_of_the_moment_at_which_reading_began() -> None:
    value = torch.tensor(2.0)
    read = reading([value, 0.5])
    value.add_(1)
    assert read() == [2.0, 0.5]
