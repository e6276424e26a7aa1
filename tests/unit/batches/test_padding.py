"""How far samples of unequal length are padded, and whether ranks that must read the same have read the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from harness.batches.padding import at_length, at_longest, padding_of
from harness.batches.same_data import tensor_digest


class Texts:
    """Samples of these lengths, as they are padded."""

    def __init__(self, lengths: list[int], block_size: int, packing: bool = False) -> None:
        self.block_size, self.packing, self._lengths = block_size, packing, np.array(lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Any:
        return [1] * int(self._lengths[index]) + [0] * (self.block_size - int(self._lengths[index]))

    def lengths(self, rows: Any = None) -> Any:
        return self._lengths if rows is None else self._lengths[rows]

    def padded_to(self, length: int) -> Texts:
        return Texts(list(self._lengths), length, self.packing)


TEXTS = Texts([3, 9, 17, 30, 8, 8], 32)
ROWS = np.array([[0, 1], [2, 3], [4, 5]])


def test_each_micro_batch_is_as_long_as_its_longest_sample_in_multiples_of_eight() -> None:
    found = padding_of(TEXTS, ROWS, one_length=False)
    assert found.lengths is not None and found.lengths.tolist() == [16, 32, 8]
    assert (found.tokens, found.padding) == (2 * 56, 2 * 56 - 75)


def test_one_length_is_that_of_the_longest_of_the_step() -> None:
    found = padding_of(TEXTS, ROWS[[0, 2]], one_length=True)
    assert found.lengths is not None and found.lengths.tolist() == [16, 16]
    assert (found.tokens, found.padding) == (64, 64 - 28)


def test_no_sample_is_longer_than_the_block() -> None:
    found = padding_of(Texts([3, 13], 13), np.array([[0, 1]]), one_length=False)
    assert found.lengths is not None and found.lengths.tolist() == [13]


def test_packed_samples_keep_their_block() -> None:
    packed = Texts([3, 9, 17, 30, 8, 8], 32, packing=True)
    found = padding_of(packed, ROWS, one_length=False)
    assert found.lengths is not None and found.lengths.tolist() == [32] * 3
    assert at_longest(packed) is packed


def test_other_data_sets_are_not_padded() -> None:
    plain: Any = [[1, 2], [3, 4]]
    assert padding_of(plain, ROWS, one_length=True).lengths is None
    assert at_length(plain, 8) is plain and at_longest(plain) is plain
    assert at_length(TEXTS, None) is TEXTS


def test_a_data_set_is_read_at_another_length() -> None:
    assert at_length(TEXTS, 16)[1] == [1] * 9 + [0] * 7
    assert len(at_longest(TEXTS)[0]) == 32
    assert len(at_longest(Texts([3, 9], 32))[0]) == 16


@pytest.mark.parametrize(
    "other",
    [
        [(torch.tensor([1, 2]), torch.tensor([[0.5]]))],  # another entry
        [(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([[0.5]]))],
        [(torch.tensor([[1, 3]]), torch.tensor([[0.5]]))],
        [(torch.tensor([1, 3]), torch.tensor([[0.5]]), "more")],
    ],
)
def test_a_digest_tells_entries_types_and_shapes_apart(other: Any) -> None:
    one = [(torch.tensor([1, 3]), torch.tensor([[0.5]]))]
    assert tensor_digest(one) == tensor_digest([(torch.tensor([1, 3]), torch.tensor([[0.5]]))])
    assert tensor_digest(one) != tensor_digest(other)


def test_a_digest_takes_values_of_any_kind_in_any_memory_order() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert tensor_digest(matrix.t().contiguous()) == tensor_digest(matrix.t())
    assert tensor_digest({"text": "a", "n": 1}) != tensor_digest({"text": "b", "n": 1})
    assert tensor_digest(torch.tensor(float("nan"))) == tensor_digest(torch.tensor(float("nan")))
    assert tensor_digest(torch.ones(2, dtype=torch.bfloat16)) != tensor_digest(torch.zeros(2, dtype=torch.bfloat16))
