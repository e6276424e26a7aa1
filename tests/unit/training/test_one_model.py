"""What ranks must hold alike, and the checksums by which they find out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from deepspeed.pipe import LayerSpec
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.console import plain_console
from harness.extras.lora import Adaptation
from harness.hf.skeleton import ModelSource
from harness.parallel.tensor.shard import Shard, mark
from harness.training.prepare.one_model import _comparable, checksum, take_first_ranks, tensors_in_memory


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=12), st.integers(0, 11), st.integers(0, 31))
def test_one_other_bit_is_another_checksum(values: list[float], place: int, bit: int) -> None:
    tensor = torch.tensor(values)
    changed = tensor.clone().view(torch.int32)
    changed[place % len(values)] ^= torch.tensor(1 << bit).to(torch.int32)
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(changed.view(torch.float32))


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.tensor(1.5), id="a-number"),
        pytest.param(torch.empty(0), id="nothing"),
        pytest.param(torch.empty(3, 0, dtype=torch.bfloat16), id="nothing-in-rows"),
        pytest.param(torch.arange(6.0).view(2, 3).bfloat16(), id="bf16"),
        pytest.param(torch.tensor([True, False]), id="booleans"),
        pytest.param(torch.arange(-2, 3, dtype=torch.int8), id="bytes"),
        pytest.param(torch.tensor([1 + 2j]), id="complex"),
        pytest.param(nn.Parameter(torch.ones(2)), id="parameter"),
        pytest.param(torch.ones(2).to(torch.float8_e4m3fn), id="fp8"),
    ],
)
def test_every_kind_of_tensor_has_a_checksum(tensor: Tensor) -> None:
    assert checksum(tensor) == checksum(tensor.detach().clone())


def test_a_checksum_is_of_the_values_however_they_lie_in_memory() -> None:
    whole = torch.arange(24.0).view(4, 6)
    assert checksum(whole.t()) == checksum(whole.t().contiguous()) != checksum(whole)
    assert checksum(whole[:, 1:3]) == checksum(whole[:, 1:3].clone())
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))


def test_of_a_list_of_layers_the_modules_are_in_memory_by_their_number() -> None:
    norm = nn.BatchNorm1d(2)
    layers = [nn.Linear(2, 2, bias=False), LayerSpec(nn.Linear, 2, 2), torch.tanh, nn.Sequential(norm)]
    found = tensors_in_memory(layers, None, None)
    assert sorted(found) == [
        *("0.weight", "3.0.bias", "3.0.num_batches_tracked", "3.0.running_mean", "3.0.running_var", "3.0.weight"),
    ]
    assert found["3.0.running_mean"] is norm.running_mean
    assert tensors_in_memory([], None, None) == tensors_in_memory([LayerSpec(nn.Linear, 2, 2)], None, None) == {}


def test_of_a_model_in_memory_its_weights_are_and_those_of_its_adapters() -> None:
    weights, adapters = {"a": torch.ones(1)}, {"b": torch.zeros(1)}
    adaptation = cast("Adaptation", SimpleNamespace(tensors=adapters))

    def source(weights: Any) -> ModelSource:
        return ModelSource(name="m", config=cast("Any", None), weights=weights)

    assert tensors_in_memory(None, source(weights), None) == weights
    assert tensors_in_memory(None, source(weights), adaptation) == {**weights, **adapters}
    assert tensors_in_memory(None, source(None), adaptation) == {}  # read or initialised by each rank


def test_a_rank_alone_keeps_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"a": torch.ones(2)}
    take_first_ranks(tensors, torch.device("cpu"), plain_console(0))
    assert tensors["a"].tolist() == [1, 1] and capsys.readouterr().out == ""


class Held(nn.Module):
    """What a rank may hold: whole, cut and half-cut parameters, and buffers that are saved or not."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.cut, self.deepspeeds = (nn.Parameter(torch.ones(2)) for _ in range(3))
        mark(self.cut, Shard(full_shape=(4,), dim=0, pieces=((0, 2),), widths=(2, 2)))
        self.deepspeeds.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.register_buffer("saved", torch.zeros(1))
        self.register_buffer("made_anew", torch.zeros(1), persistent=False)


def test_along_each_axis_those_weights_are_compared_that_must_be_alike() -> None:
    found = _comparable(Held(), zero_stage=1)
    assert sorted(found["tensor"]) == ["saved", "whole"]
    assert sorted(found["data"]) == ["cut", "deepspeeds", "saved", "whole"]
    assert found["pipeline"] == {}
    assert _comparable(Held(), zero_stage=3)["data"] == {}  # each has its own part
    assert _comparable(Held(), zero_stage=3)["tensor"].keys() == found["tensor"].keys()


def test_tied_weights_are_compared_along_the_stages_by_their_names() -> None:
    class Tied(nn.Linear):
        names = ("head.weight", "embedding.weight")

    one, other = Held(), Held()
    weights = Tied(2, 2)
    for module in (one, other):
        module.__dict__["tied_modules"] = {"embed": weights}
    found = _comparable(one, 0)["pipeline"]
    assert list(found) == ["embed (head.weight, embedding.weight)"]
    assert found == _comparable(other, 0)["pipeline"]
    with torch.no_grad():
        weights.bias += 1
    assert found != _comparable(other, 0)["pipeline"]


def test_weights_that_differ_differ_in_what_is_compared() -> None:
    one, other = Held(), Held()
    assert _comparable(one, 0) == _comparable(other, 0)
    with torch.no_grad():
        other.cut += 1e-7
    first, second = _comparable(one, 0), _comparable(other, 0)
    assert first["tensor"] == second["tensor"] and first["data"] != second["data"]
