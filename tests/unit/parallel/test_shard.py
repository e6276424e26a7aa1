"""Shards: what a rank takes and gives back, with and without copies and padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.config.model.sharding import Heads, shard_range
from harness.parallel.tensor.shard import Shard, cut_parameter, mark, shard_of, share_of

SIZES = st.integers(1, 5)
COPIES = [(0, 2), (0, 2), (2, 4), (2, 4)]


@given(
    size=SIZES,
    more=st.integers(0, 7),
    parts=st.integers(1, 3),
    copies=st.integers(1, 3),
    multiple=st.integers(1, 4),
    dim=st.integers(-2, 1),
)
def test_what_the_owners_put_back_is_the_whole(
    size: int, more: int, parts: int, copies: int, multiple: int, dim: int
) -> None:
    shape = [3, 3]
    shape[dim] = (size + more) * parts
    full = torch.arange(1, shape[0] * shape[1] + 1).view(*shape)
    written = torch.zeros_like(full)
    ranges = [shard_range(size + more, rank // copies, size) for rank in range(size * copies)]
    for rank in range(size * copies):
        shard = share_of((shape[0], shape[1]), dim, rank, ranges=ranges, parts=parts, multiple=multiple)
        local = shard.take(full)
        assert tuple(local.shape) == shard.local_shape
        assert local.shape[dim] % multiple == 0
        assert torch.count_nonzero(local) == shard.widths[rank] * shape[1 - dim % 2]
        assert (shard.copied, shard.unequal) == (copies > 1, more % size > 0)
        found = torch.zeros_like(full)
        shard.put(local + 7, found)  # what stands in the padding is not put back
        written += (found - 7 * (found > 0)) * shard.owner
    assert torch.equal(written, full)


@given(size=SIZES, more=st.integers(0, 12))
def test_shares_differ_by_one_at_most(size: int, more: int) -> None:
    widths = share_of((size + more, 1), 0, 0, size).widths
    assert sum(widths) == size + more and max(widths) - min(widths) <= 1


@given(key_values=st.integers(1, 8), group=st.integers(1, 7), size=st.integers(1, 16))
def test_each_key_value_head_serves_equally_many_query_heads_of_a_rank(key_values: int, group: int, size: int) -> None:
    heads = Heads(query=key_values * group, key_value=key_values)
    assert heads.fit(size) == (size <= heads.query)
    if not heads.fit(size):
        return
    queries, own = heads.queries(size), heads.key_values(size)
    assert [head for start, stop in queries for head in range(start, stop)] == list(range(heads.query))
    assert {head for start, stop in own for head in range(start, stop)} == set(range(key_values))
    for (first, last), (start, stop) in zip(queries, own, strict=True):
        served = [query // group for query in range(first, last)]
        assert served and len(served) % (stop - start) == 0
        assert served == [start + index // (len(served) // (stop - start)) for index in range(len(served))]


def test_fourteen_heads_of_two_key_value_heads_on_four_ranks() -> None:
    heads = Heads(query=14, key_value=2)
    assert [stop - start for start, stop in heads.queries(4)] == [4, 3, 4, 3]
    assert heads.key_values(4) == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_a_packed_weight_gives_a_share_of_every_part() -> None:
    query, key, value = torch.arange(4), torch.arange(10, 14), torch.arange(20, 24)
    shard = share_of((12,), 0, rank=1, size=2, parts=3)
    assert shard.take(torch.cat([query, key, value])).tolist() == [2, 3, 12, 13, 22, 23]


def test_another_shape_is_told() -> None:
    with pytest.raises(ValueError, match=r"got a tensor of shape \(4, 3\), expected \(4, 2\)"):
        share_of((4, 2), 0, 0, 2).take(torch.zeros(4, 3))


@pytest.mark.parametrize("request_", [{"size": 9}, {"size": 2, "parts": 3}])
def test_parts_that_are_not_equal_and_ranks_without_a_share_are_refused(request_: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        share_of((8, 2), 0, 0, **request_)


def test_a_cut_parameter_tells_its_shard_and_deepspeed_what_to_count() -> None:
    whole = nn.Parameter(torch.arange(8.0).view(4, 2), requires_grad=False)
    owner, copy = (cut_parameter(whole, share_of((4, 2), 0, rank, ranges=COPIES)) for rank in (2, 3))
    assert torch.equal(owner, copy)
    assert (owner.tensor_model_parallel, copy.tensor_model_parallel) == (True, False)  # type: ignore[attr-defined]
    assert not owner.requires_grad
    assert shard_of(whole) is None


def test_a_meta_parameter_is_cut_and_its_successor_can_be_marked() -> None:
    shard = share_of((5, 2), 0, 1, 2, multiple=3)
    local = cut_parameter(nn.Parameter(torch.empty(5, 2, device="meta")), shard)
    assert local.is_meta
    assert local.shape == (3, 2)
    successor = mark(nn.Parameter(torch.empty(local.shape)), shard_of(local))
    assert shard_of(successor) == Shard(full_shape=(5, 2), dim=0, pieces=((3, 5),), padding=1, widths=(3, 2))
    assert shard_of(mark(nn.Parameter(torch.empty(1)), None)) is None
