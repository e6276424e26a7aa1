"""What crosses from stage to stage arrives as it was, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.parallel.pipeline.staged_module import DTYPES, Unpacker, pack_payload


def test_a_tuple_of_many_kinds_arrives_as_it_was_and_its_gradients_go_back() -> None:
    hidden = torch.randn(2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    state = torch.randn(5, requires_grad=True)
    mask, numbers, few = torch.tensor([True, False]), torch.arange(6).view(2, 3), torch.arange(2, dtype=torch.int32)
    sent = pack_payload((hidden, mask, state, numbers, few))
    assert [tensor.is_floating_point() for tensor in sent] == [True] + [False] * 4
    assert {tensor.dtype for tensor in sent[1:]} == {torch.int64}
    arrived = Unpacker()(sent)
    for before, after in zip((hidden, mask, state, numbers, few), arrived, strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after)
    (arrived[0].float().sum() * 2 + (arrived[2] * torch.arange(5)).sum()).backward()
    assert torch.equal(hidden.grad, torch.full_like(hidden, 2))
    assert torch.equal(state.grad, torch.arange(5.0))


def test_what_is_sent_as_it_is_is_not_touched() -> None:
    hidden, ids = torch.randn(2, 3, 4), torch.arange(6).view(2, 3)
    unpack = Unpacker()
    for value in (hidden, (hidden, ids), (hidden, ids, ids)):
        assert pack_payload(value) is value and unpack(value) is value


def test_one_unpacker_serves_several_shapes() -> None:
    unpack = Unpacker()
    for rows in (2, 5, 2):
        first, second = torch.randn(rows, 3), torch.randn(rows)
        assert all(map(torch.equal, unpack(pack_payload((first, second))), (first, second)))


def test_a_first_tensor_of_one_dimension_is_packed_too() -> None:
    value = (torch.randn(4), torch.arange(3))
    assert all(map(torch.equal, Unpacker()(pack_payload(value)), value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param([(4, 3, 2), (12, 5)], [(2, 6, 2), (12, 5)], id="fewer and longer samples, as in an evaluation"),
        pytest.param([(6, 2), (6,)], [(3, 4), (6,)], id="a state of the same size"),
    ],
)
def test_values_of_one_size_in_all_are_told_apart_by_their_rows(one: Any, other: Any) -> None:
    unpack = Unpacker()
    for shapes in (one, other, one):
        value = tuple(torch.randn(shape) for shape in shapes)
        arrived = unpack(pack_payload(value))
        assert [tuple(tensor.shape) for tensor in arrived] == shapes
        assert all(map(torch.equal, arrived, value))


SHAPES = st.lists(st.integers(0, 4), max_size=3)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=4), SHAPES)
def test_any_tuple_that_begins_with_a_hidden_state_arrives_as_it_was(rest: Any, first: list[int]) -> None:
    hidden = torch.randn(first)
    wanted = (hidden, *(torch.ones(shape).to(dtype) for shape, dtype in rest))
    arrived = Unpacker()(pack_payload(wanted))
    assert [tensor.dtype for tensor in arrived] == [tensor.dtype for tensor in wanted]
    assert all(map(torch.equal, arrived, wanted))
