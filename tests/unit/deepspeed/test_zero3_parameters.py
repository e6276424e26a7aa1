"""What ZeRO-3 notes on parameters is read as it means it, and parameters that are spread in place keep their values."""

from __future__ import annotations

from typing import Any, TypeAlias

import deepspeed
import pytest
import torch
from torch import nn
from torch.nn import functional

from harness.deepspeed.zero3_parameters import (
    Partition,
    PartitionInPlace,
    held_tensor,
    is_partitioned,
    restore_linear,
    unpartitioned_shape,
    unpartitioned_size,
)

pytestmark = pytest.mark.usefixtures("one_rank")
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
Spread: TypeAlias = tuple[nn.Module, dict[str, torch.Tensor]]


class Model(nn.Module):
    """Weights of several shapes, one without values, one frozen, two under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.tied = self.linear
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.arange(7.0), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))


def spread_in_place(model: nn.Module) -> None:
    PartitionInPlace(model, config_dict_or_path=CONFIG, dtype=torch.float32)


@pytest.fixture
def spread() -> Spread:
    """A model whose parameters are spread in place, and their values before."""
    model = Model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    spread_in_place(model)
    return model, before


def test_parameters_that_are_spread_keep_their_values(spread: Spread) -> None:
    model, before = spread
    assert before.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert is_partitioned(parameter) and parameter.numel() == 0
        assert torch.equal(held_tensor(parameter)[: before[name].numel()].view(before[name].shape), before[name])
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name])
    assert not is_partitioned(model.get_buffer("table"))


def test_shapes_and_sizes_are_those_of_the_whole(spread: Spread) -> None:
    model, before = spread
    for name, parameter in model.named_parameters():
        shape, total = tuple(before[name].shape), before[name].numel()
        divided = Partition.of(parameter)
        assert unpartitioned_shape(parameter) == shape
        assert (divided.shape, divided.total, divided.size) == (shape, total, total)
    assert unpartitioned_size(list(model.parameters())) == 15 + 5 + 0 + 7
    assert unpartitioned_size([]) == 0


@pytest.mark.parametrize("tensor", [torch.zeros(2, 3), torch.tensor(1.0), nn.Parameter(torch.zeros(0))], ids=str)
def test_a_tensor_that_nobody_has_divided_is_itself(tensor: torch.Tensor) -> None:
    assert not is_partitioned(tensor)
    assert held_tensor(tensor) is tensor
    assert unpartitioned_shape(tensor) == tuple(tensor.shape)


def test_what_is_spread_already_is_left_alone(spread: Spread) -> None:
    model, before = spread
    ids = [parameter.ds_id for parameter in model.parameters()]
    model.added = nn.Linear(2, 2)
    spread_in_place(model)
    assert [parameter.ds_id for parameter in model.parameters()][: len(ids)] == ids
    assert torch.equal(held_tensor(model.get_parameter("frozen")), before["frozen"])
    assert is_partitioned(model.added.weight)


def test_a_deepspeed_that_spreads_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = deepspeed.zero.Init._convert_to_deepspeed_param

    def uneven(self: Any, param: Any) -> None:
        convert(self, param)
        spread_evenly = param.partition

        def partition(*args: Any, **kwargs: Any) -> None:
            spread_evenly(*args, **kwargs)
            param.ds_tensor.ds_numel += 1

        param.partition = partition

    monkeypatch.setattr(deepspeed.zero.Init, "_convert_to_deepspeed_param", uneven)
    with pytest.raises(RuntimeError, match="partitions parameters in an unknown way"):
        spread_in_place(nn.Linear(3, 5))


def test_a_deepspeed_that_spreads_all_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionInPlace, "_zero_init_param", lambda _self, _param: None)
    with pytest.raises(RuntimeError, match="does not partition parameters one by one"):
        spread_in_place(nn.Linear(3, 5))


def test_torch_gets_its_linear_back() -> None:
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        replaced = functional.linear
    restore_linear()
    restore_linear()  # once more changes nothing
    assert functional.linear is not replaced
    assert functional.linear(torch.ones(1, 2), torch.ones(0, 2)).shape == (1, 0)  # a layer of width zero
