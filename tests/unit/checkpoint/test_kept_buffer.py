"""Copies that last while what they are of changes, in memory that is allocated once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
import torch

from harness.checkpoint.background_save import KeptBuffer


@pytest.fixture
def thread() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def tensors() -> list[torch.Tensor]:
    whole = torch.arange(24.0).view(4, 6)
    return [
        whole,
        whole[:, 1:4],
        torch.tensor(3.0),
        torch.empty(0),
        whole.bfloat16(),
        torch.tensor([True, False, True]),
    ]


def test_copies_keep_values_shapes_and_dtypes_while_the_tensors_change(thread: Executor) -> None:
    given, wanted = tensors(), tensors()
    copies = KeptBuffer().copy(given, thread)
    for tensor in given:
        tensor.zero_()
    for copy, tensor in zip(copies, wanted, strict=True):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)


def test_the_memory_is_allocated_once_and_grows_where_it_must(thread: Executor) -> None:
    buffer = KeptBuffer()
    first, again = (buffer.copy([torch.full((100,), value)], thread)[0] for value in (1.0, 2.0))
    assert first.data_ptr() == again.data_ptr()
    assert torch.equal(buffer.copy([torch.ones(1000)], thread)[0], torch.ones(1000))
