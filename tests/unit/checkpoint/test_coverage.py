"""What would be saved is counted first: a value that no rank writes, or two do, stops the save."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.checkpoint.tensors.local_shard import LocalShard
from harness.checkpoint.tensors.whole_tensors import require_each_value_once
from harness.device.process_group import start
from harness.errors import UserError
from harness.parallel.tensor.shard import share_of
from harness.topology.env import LaunchEnv

ALONE: Any = SimpleNamespace(tp_group=None, dp_group=None)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    was_open = dist.is_initialized()
    start(LaunchEnv())
    yield
    if not was_open:
        dist.destroy_process_group()


def held(
    shape: tuple[int, ...], values: torch.Tensor, *, name: str = "w", owned: bool = True, **more: Any
) -> LocalShard:
    return LocalShard(
        name=name, shape=shape, shard=more.get("shard"), start=more.get("start", 0), values=values, owned=owned
    )


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param([], id="nothing"),
        pytest.param([held((3, 4), torch.zeros(3, 4))], id="in its shape"),
        pytest.param([held((3, 4), torch.zeros(12)), held((), torch.tensor(1.0), name="n")], id="flat, and a number"),
        pytest.param([held((0, 4), torch.zeros(0))], id="without values"),
    ],
)
def test_whole_tensors_pass(tensors: list[LocalShard]) -> None:
    require_each_value_once(tensors, ALONE)


@pytest.mark.parametrize(
    ("wrong", "count", "size"),
    [
        pytest.param(held((3, 4), torch.zeros(11)), "11", "12", id="one is missing"),
        pytest.param(held((3, 4), torch.zeros(0)), "0", "12", id="they lie elsewhere"),
        pytest.param(held((3, 4), torch.zeros(12), owned=False), "0", "12", id="another rank was to write them"),
        pytest.param(held((1024, 1024), torch.zeros(4, 1024)), "4,096", "1,048,576", id="some rows"),
        pytest.param(
            held((2, 4), torch.zeros(2, 4), shard=share_of((4, 4), 0, 1, 2)), "8", "16", id="a shard of two, alone"
        ),
    ],
)
def test_what_lacks_values_is_named(wrong: LocalShard, count: str, size: str) -> None:
    whole = held((2,), torch.zeros(2), name="norm")
    words = f"no checkpoint can be saved in this layout: w: the ranks would save {count} of its {size} values"
    with pytest.raises(UserError, match=f"^{words}; please report it$"):
        require_each_value_once([whole, wrong], ALONE)


def test_padding_of_a_shard_is_not_counted() -> None:
    shard = share_of((3, 4), 0, 1, 2, multiple=2)  # the second of two ranks has one row of three, and a row of padding
    with pytest.raises(UserError, match=r"would save 4 of its 12 values|would save 8 of its 12 values"):
        require_each_value_once([held(shard.local_shape, torch.zeros(shard.local_shape), shard=shard)], ALONE)
