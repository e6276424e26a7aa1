"""What a layer is called with: split from the hidden state, passed again, compared and mapped."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from harness.hf.layers.call import LayerInputs, same

HIDDEN, MASK = torch.ones(2, 3), torch.arange(3.0)


class Pair(NamedTuple):
    cos: Tensor
    sin: Tensor


@pytest.mark.parametrize(
    ("args", "kwargs", "key"),
    [
        pytest.param((HIDDEN,), {}, None, id="alone"),
        pytest.param((HIDDEN, MASK, 7), {"use_cache": False}, None, id="first of several"),
        pytest.param((), {"hidden_states": HIDDEN, "mask": MASK}, "hidden_states", id="by its name"),
    ],
)
def test_a_layer_is_called_again_as_it_was(args: tuple[Any, ...], kwargs: dict[str, Any], key: str | None) -> None:
    hidden, inputs = LayerInputs.split(args, kwargs)
    assert hidden is HIDDEN and inputs.key == key
    called: list[Any] = []
    inputs.apply(lambda *given, **named: called.append((given, named)), hidden)
    assert called == [(args, kwargs)]
    assert all(value is not HIDDEN for value in inputs.arguments().values())
    assert all(inputs.argument(place) is value for place, value in inputs.arguments().items())


def test_a_call_without_a_hidden_state_is_an_error() -> None:
    with pytest.raises(KeyError, match="hidden_states"):
        LayerInputs.split((), {"x": HIDDEN})


NAN = torch.tensor([float("nan"), 1.0])


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        pytest.param(MASK, MASK.clone(), True, id="tensors"),
        pytest.param(MASK, MASK + 1, False, id="other values"),
        pytest.param(MASK, MASK[None], False, id="another shape"),
        pytest.param(NAN, NAN.clone(), True, id="NaN in the same place"),
        pytest.param((MASK, {"a": [MASK]}), (MASK, {"a": [MASK.clone()]}), True, id="nested"),
        pytest.param((MASK, {"a": [MASK]}), (MASK, {"a": [MASK + 1]}), False, id="another deep inside"),
        pytest.param({"a": MASK}, {"b": MASK}, False, id="other keys"),
        pytest.param((MASK,), (MASK, MASK), False, id="one more"),
        pytest.param(MASK, None, False, id="a tensor or none"),
        pytest.param((MASK,), MASK, False, id="a tuple or its tensor"),
        pytest.param({"a": None}, {"a": MASK}, False, id="none or a tensor inside"),
        pytest.param(None, {}, False, id="none or a mapping"),
        pytest.param(None, None, True, id="none"),
    ],
)
def test_values_are_the_same_either_way_round(one: object, other: object, equal: bool) -> None:
    assert same(one, other) == same(other, one) == equal
    inputs = LayerInputs((one,), {}, None)
    assert inputs.equals(LayerInputs((other,), {}, None)) == equal


def test_every_tensor_is_mapped_and_what_was_given_stays() -> None:
    cache = UserDict({"keys": MASK, "length": 3})
    inputs = LayerInputs((Pair(MASK, MASK), [MASK, "eager"]), {"cache": cache, "flag": True}, None)
    found = inputs.mapped(lambda tensor: tensor + 1)
    pair, listed = found.args
    assert isinstance(pair, Pair) and torch.equal(pair.sin, MASK + 1)
    assert torch.equal(listed[0], MASK + 1) and listed[1] == "eager"
    assert isinstance(found.kwargs["cache"], UserDict) and torch.equal(found.kwargs["cache"]["keys"], MASK + 1)
    assert (found.kwargs["cache"]["length"], found.kwargs["flag"]) == (3, True)
    assert cache["keys"] is MASK
