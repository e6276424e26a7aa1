"""Lazy tensors give what real ones give, through every operation that arranges values and through those that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.hf.weights.lazy_tensor import Computed, InMemory, LazyTensor
from harness.parallel.tensor.shard import Shard

REAL = torch.arange(48.0).view(2, 6, 4)


def lazy() -> LazyTensor:
    return LazyTensor.of(InMemory(REAL))


def read(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


ARRANGEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "slices": lambda x: x[:, 2:5, 1:],
    "a slice of a permuted slice": lambda x: x[:, 1:5].permute(2, 0, 1)[1:3, :, 2:3],
    "transposed": lambda x: x.transpose(0, 2)[1].t(),
    "one of the first": lambda x: x[1, 2:],
    "the last": lambda x: x[-1, :, -2],
    "stacked": lambda x: torch.stack([x[1], x[0], x[1]], dim=1)[:, 1:],
    "joined": lambda x: torch.cat([x, x[:, 1:3], x[:, :1]], dim=1)[:, 5:8, 1:],
    "joined of stacked": lambda x: torch.cat([torch.stack([x[0], x[1]]), torch.stack([x[1], x[0]])], dim=-1)[
        1:, 2:, 3:6
    ],
    "chunks": lambda x: torch.cat(torch.chunk(x, 3, dim=1)[::-1], dim=1),
    "chunks without the dimension": lambda x: torch.chunk(x, 2, dim=0)[1].squeeze(0)[1:3],
    "splits": lambda x: torch.split(x, [1, 4, 1], dim=1)[1].contiguous(),
    "unbound": lambda x: x.unbind(1)[3],
    "one value": lambda x: x[1, 2, 3],
    "with a dimension more": lambda x: x.unsqueeze(2)[:, 3:, :, 1],
    "clone": lambda x: x.detach().clone()[...],
}
COMPUTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "interleaved": lambda x: x.reshape(2, 3, 2, 4).transpose(1, 2).reshape(x.shape).contiguous()[1, :, 2:],
    "a view": lambda x: x.view(12, 4)[3:5],
    "every second": lambda x: x[:, ::2][1:],
    "negated, then cut": lambda x: (-x)[:, 4:].transpose(0, 1),
}


@pytest.mark.parametrize("name", [*ARRANGEMENTS, *COMPUTATIONS])
def test_a_lazy_tensor_gives_what_a_real_one_gives(name: str) -> None:
    function = {**ARRANGEMENTS, **COMPUTATIONS}[name]
    result = function(lazy())
    assert isinstance(result, LazyTensor)
    assert any(isinstance(patch.leaf, Computed) for patch in result.patches) == (name in COMPUTATIONS)
    assert torch.equal(read(result), function(REAL))


def test_it_is_read_into_any_dtype_and_strides() -> None:
    into = torch.zeros(6, 4, 2, dtype=torch.float64).permute(2, 0, 1)
    into.copy_(lazy())
    assert torch.equal(into, REAL.double())
    assert torch.equal(read(lazy().to(torch.bfloat16)), REAL.bfloat16())


def test_a_shard_is_read_of_it_as_of_a_real_tensor() -> None:
    shard = Shard(full_shape=(2, 6, 4), dim=1, pieces=((1, 2), (4, 6)), padding=1)
    local = torch.full(shard.local_shape, 9.0)
    shard.read_into(local, lazy())
    assert torch.equal(local, shard.take(REAL))


def test_only_what_is_asked_for_is_read() -> None:
    asked = []

    class Watched(InMemory):
        def read(self, into: Tensor, box: tuple[tuple[int, int], ...]) -> None:
            asked.append(box)
            super().read(into, box)

    whole = torch.stack([LazyTensor.of(Watched(REAL)), LazyTensor.of(Watched(REAL))])
    assert torch.equal(read(whole[1, :, 2:3]), REAL[:, 2:3])
    assert asked == [((0, 2), (2, 3), (0, 4))]


def test_tensors_that_do_not_fit_together_are_not_joined() -> None:
    with pytest.raises(ValueError, match="cannot be joined"):
        torch.cat([lazy(), lazy()[:, :, :2]], dim=1)
    with pytest.raises(ValueError, match="cannot be joined"):
        torch.stack([lazy()[0], lazy()[0, :3]])
