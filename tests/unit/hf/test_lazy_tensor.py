"""Lazy tensors give what real ones give, through every operation that arranges values and through those that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


def test_an_empty_tensor_is_split_into_one_part() -> None:
    assert [tuple(part.shape) for part in lazy()[:0].split(2)] == [tuple(part.shape) for part in REAL[:0].split(2)]


def test_tensors_that_do_not_fit_together_are_not_joined() -> None:
    with pytest.raises(ValueError, match="cannot be joined"):
        torch.cat([lazy(), lazy()[:, :, :2]], dim=1)
    with pytest.raises(ValueError, match="cannot be joined"):
        torch.stack([lazy()[0], lazy()[0, :3]])


def arranged(tensor: Tensor, data: st.DataObject) -> Callable[[Tensor], Tensor]:
    """A drawn operation that a tensor of this shape has."""
    dim = data.draw(st.integers(0, tensor.dim() - 1))
    size = tensor.shape[dim]
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    order = data.draw(st.permutations(range(tensor.dim())))
    index = data.draw(st.integers(-size, size - 1)) if size else 0
    operations: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.narrow(dim, start, stop - start),
        lambda x: x.permute(order),
        lambda x: x.unsqueeze(dim),
        lambda x: x.transpose(dim, 0),
        lambda x: torch.cat([x, x.narrow(dim, start, stop - start)], dim=dim),
        lambda x: torch.stack([x, x], dim=dim),
        lambda x: torch.cat(x.split(max(size // 2, 1), dim)[::-1], dim=dim),
    ]
    if size and tensor.dim() > 1:
        operations.append(lambda x: x.select(dim, index))
    return data.draw(st.sampled_from(operations))


@given(st.data())
def test_any_chain_of_arrangements_gives_what_it_gives_of_a_real_tensor(data: st.DataObject) -> None:
    real, tensor = REAL, lazy()
    for _ in range(data.draw(st.integers(1, 6))):
        operation = arranged(real, data)
        real, tensor = operation(real), operation(tensor)
        assert tensor.shape == real.shape
        if real.numel() > 2000:
            break
    assert torch.equal(read(tensor), real)
    assert not any(isinstance(patch.leaf, Computed) for patch in tensor.patches)  # nothing is read to be arranged


def test_other_leaves_take_the_places_of_the_former_ones_in_computed_tensors_too() -> None:
    named = LazyTensor.of(InMemory(REAL, "a"))
    both = torch.cat([named[:, 2:4], -named], dim=1)
    assert {leaf.name for leaf in both.leaves()} == {"a"}
    asked: list[str] = []

    def doubled(name: str) -> InMemory:
        asked.append(name)
        return InMemory(2 * REAL, name)

    changed = both.with_leaves(doubled)
    assert torch.equal(read(changed), 2 * torch.cat([REAL[:, 2:4], -REAL], dim=1))
    assert set(asked) == {"a"}


def test_an_operation_that_gives_several_tensors_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="of tensors that are not read yet"):
        torch.sort(lazy())
