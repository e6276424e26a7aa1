"""What layers hand on, and what is kept of what they are given: order, names, and when it is made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.hf.forward.outer_forward import KEPT_BATCHES, KEPT_SHAPES, HiddenShape, LayerInputCache
from harness.hf.forward.payload import CarriedTensor, PayloadSpec, StagePayload, Tokens
from harness.hf.forward.placeholders import AttributeProxy, PlaceholderModule, output_like

HIDDEN, IDS, POSITIONS = torch.randn(2, 3, 4), torch.arange(6).view(2, 3), torch.arange(3).repeat(2, 1)
STATES = st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 5)), max_size=4)


@given(STATES, st.integers(0, 5), st.sampled_from([None, Tokens(IDS), Tokens(IDS, POSITIONS)]))
def test_what_is_closed_at_a_boundary_is_opened_there(ends: Any, boundary: int, tokens: Tokens | None) -> None:
    states = tuple(CarriedTensor(name=str(i), made=made, used=used) for i, (made, used) in enumerate(ends))
    spec = PayloadSpec(states=states)
    given_states = {state.name: torch.full((2,), float(index)) for index, state in enumerate(states)}
    sent = spec.close(boundary, StagePayload(hidden=HIDDEN, states=given_states, tokens=tokens))
    names = [state.name for state in states if state.made < boundary <= state.used]
    assert isinstance(sent, Tensor) == (not names and tokens is None)
    opened = spec.open(boundary, sent)
    assert opened.hidden is HIDDEN
    assert list(opened.states) == names == spec.names(boundary)
    assert all(torch.equal(opened.states[name], given_states[name]) for name in names)
    assert (opened.tokens and opened.tokens.tensors()) == (tokens and tokens.tensors())


def test_a_state_is_a_new_object_of_the_same_memory_at_each_boundary() -> None:
    spec = PayloadSpec(states=(CarriedTensor(name="a", made=-1, used=9),))
    state = torch.ones(2, requires_grad=True)
    payload = StagePayload(hidden=HIDDEN).with_state("a", state)
    _, sent = spec.close(3, payload)
    assert sent is not state and sent.data_ptr() == state.data_ptr() and sent.requires_grad


@pytest.mark.parametrize(
    ("spec", "bare"),
    [
        (PayloadSpec(), True),
        (PayloadSpec(replayed=True), True),
        (PayloadSpec(tokens=True), False),
        (PayloadSpec(states=(CarriedTensor(name="a", made=0, used=1),)), False),
    ],
)
def test_a_payload_is_bare_where_only_the_hidden_state_travels(spec: PayloadSpec, bare: bool) -> None:
    assert spec.bare == bare


def test_a_batch_is_ids_or_ids_with_positions() -> None:
    assert Tokens.of(IDS).tensors() == (IDS,)
    assert Tokens.of((IDS, POSITIONS)).tensors() == (IDS, POSITIONS)


class Made:
    """Counts what a cache makes."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.cache = LayerInputCache(self._make, torch.device("cpu"))

    def _make(self, tokens: Tokens, dtype: torch.dtype) -> list[Any]:
        self.asked.append((tuple(tokens.ids.shape), dtype))
        return [len(self.asked)]


def test_inputs_are_made_once_for_a_shape_and_the_oldest_shape_is_forgotten() -> None:
    made = Made()
    shapes = [HiddenShape(1, length, torch.float32) for length in range(1, KEPT_SHAPES + 2)]
    for shape in (*shapes[:-1], *shapes[:-1]):
        made.cache.of_shape[shape]
    assert len(made.asked) == KEPT_SHAPES
    made.cache.of_shape[shapes[-1]]
    assert made.cache.of_shape[shapes[1]] == [2]
    made.cache.of_shape[shapes[0]]
    assert len(made.asked) == KEPT_SHAPES + 2
    made.cache.of_shape[HiddenShape(1, 1, torch.bfloat16)]
    assert made.asked[-1] == ((1, 1), torch.bfloat16)


def test_inputs_of_a_batch_are_found_by_its_memory_and_shape() -> None:
    made, ids = Made(), IDS.clone()
    first = made.cache.of_batch(Tokens(ids), torch.float32)
    assert made.cache.of_batch(Tokens(ids.detach()), torch.float32) is first  # as recomputation gives it again
    assert made.cache.of_batch(Tokens(ids.view(3, 2)), torch.float32) is not first
    assert made.cache.of_batch(Tokens(ids), torch.float32) is first
    assert made.cache.of_batch(Tokens(ids, POSITIONS), torch.float32) is not first
    assert len(made.asked) == 3


def test_as_many_batches_are_kept_as_a_forward_and_its_repetition_need() -> None:
    made, batches = Made(), [Tokens(IDS.clone()) for _ in range(KEPT_BATCHES + 1)]
    for batch in batches:
        made.cache.of_batch(batch, torch.float32)
    for batch in reversed(batches[1:]):
        made.cache.of_batch(batch, torch.float32)
    assert len(made.asked) == KEPT_BATCHES + 1
    made.cache.of_batch(batches[0], torch.float32)
    assert len(made.asked) == KEPT_BATCHES + 2


def test_a_shape_is_that_of_the_ids_where_they_travel() -> None:
    flat = torch.randn(6, 4, dtype=torch.bfloat16)
    assert HiddenShape.of(HIDDEN, None) == HiddenShape(2, 3, torch.float32)
    assert HiddenShape.of(flat, Tokens(IDS)) == HiddenShape(2, 3, torch.bfloat16)
    assert HiddenShape(2, 3, torch.float32).tokens(torch.device("cpu")).ids.shape == (2, 3)


def test_a_placeholder_answers_for_the_module_whose_place_it_takes() -> None:
    original = nn.Embedding(5, 4, padding_idx=2)
    proxy = AttributeProxy(original)
    assert (proxy.padding_idx, proxy.weight.dtype) == (2, torch.float32)
    assert list(proxy.parameters()) == []
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = proxy.nothing_of_this_name


class Picky(nn.Linear):
    """Looks at values, which are not there on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool((x > 0).any()) else x


@pytest.mark.parametrize(
    ("build", "value", "shape"),
    [
        pytest.param(lambda: nn.Embedding(5, 4), IDS, (2, 3, 4), id="an embedding"),
        pytest.param(lambda: nn.Linear(4, 7), HIDDEN, (2, 3, 7), id="a projection"),
        pytest.param(lambda: nn.LayerNorm(4), HIDDEN, (2, 3, 4), id="a norm"),
        pytest.param(lambda: Picky(4, 7), HIDDEN, (2, 3, 7), id="a projection that asks for values"),
    ],
)
def test_a_placeholder_gives_what_its_module_would_give(build: Any, value: Tensor, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        original = build()
    assert tuple(output_like(original, (value,), {}).shape) == shape
    calls = []

    def output_of(like: Tensor, call: Any) -> Tensor:
        calls.append(call)
        return like.fill_(3)

    placeholder = PlaceholderModule(original, torch.device("cpu"), output_of)
    for _ in range(2):
        assert torch.equal(placeholder(value), torch.full(shape, 3.0))
    assert placeholder(value[:1]).shape == (1, *shape[1:])
    assert [call[0][0].shape[0] for call in calls] == [2, 2, 1]
