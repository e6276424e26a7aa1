"""Segments of unequal width: each entry is held once, and a rank uses whole units."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.errors import UserError
from harness.parallel.comm import TensorParallel
from harness.parallel.tensor.shard import (
    Segment,
    cut_segments,
    product_of,
    read_segments,
    shard_of,
    shard_of_segments,
    sum_of,
)

OWNER = SimpleNamespace(num_heads=4, kv_heads=2, head_dim=4)
WORDS = ["num_heads * head_dim", "kv_heads * head_dim", "kv_heads * head_dim"]
WIDTH = 32


def ranks(size: int) -> list[TensorParallel]:
    return [TensorParallel(rank=rank, size=size) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_every_entry_is_held_by_one_rank(size: int) -> None:
    owner = SimpleNamespace(**{**vars(OWNER), "head_dim": 3, "num_heads": 6, "kv_heads": 1 if size == 3 else 2})
    width = sum_of(" + ".join(WORDS), [owner])
    held = torch.zeros(width)
    for rank in ranks(size):
        shard = shard_of_segments(read_segments(WORDS, [owner], width, rank, "it"), (width,), 0, rank)
        shard.put(torch.ones(shard.length), part := torch.zeros(width))
        held += part
    assert torch.equal(held, torch.ones(width))


def test_a_rank_uses_its_own_units_or_one_that_it_shares() -> None:
    used = [[s.used(rank) for s in read_segments(WORDS, [OWNER], WIDTH, rank, "it")] for rank in ranks(4)]
    assert used == [
        [(0, 4), (16, 20), (24, 28)],
        [(4, 8), (16, 20), (24, 28)],
        [(8, 12), (20, 24), (28, 32)],
        [(12, 16), (20, 24), (28, 32)],
    ]


def test_a_parameter_is_cut_or_where_ranks_share_a_unit_seen_in_part() -> None:
    for size, local in ((2, 16), (4, 12)):
        conv = nn.Conv1d(WIDTH, WIDTH, 2, groups=WIDTH)
        whole = conv.weight.detach().clone()
        rank = TensorParallel(rank=1, size=size)
        segments = read_segments(WORDS, [conv, OWNER], WIDTH, rank, "it")
        cut_segments(conv, "weight", segments, 0, rank)
        assert torch.equal(conv.weight, torch.cat([whole[slice(*s.used(rank))] for s in segments]))
        assert len(conv.weight) == local
        assert (shard_of(conv._parameters["weight"]) is None) == (size == 4)  # type: ignore[arg-type]


def test_a_module_whose_parameters_zero_3_has_taken_away_is_still_printed() -> None:
    conv = nn.Conv1d(12, 12, 3)
    segments = [Segment(start=0, units=4, width=2), Segment(start=8, units=1, width=4)]
    for name in ("weight", "bias"):
        cut_segments(conv, name, segments, 0, ranks(2)[1])
        conv._parameters[name].data = torch.empty(0)
    assert repr(conv).startswith("Conv1d(12, 12") and conv.bias is conv._parameters["bias"]


@pytest.mark.parametrize(
    ("words", "width", "size", "told"),
    [
        (WORDS, WIDTH, 3, "autotp_size 3 does not fit the 4 num_heads of it: use 1, 2 or 4"),
        (WORDS, WIDTH + 1, 2, "the 33 outputs of it are not the concatenation of .*: correct the plan"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(words: list[str], width: int, size: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_segments(words, [OWNER], width, TensorParallel(size=size), "it")


@pytest.mark.parametrize(
    ("words", "factors"),
    [
        ("3", [3]),
        ("num_heads", [4]),
        (" num_heads*head_dim ", [4, 4]),
        ("2 * kv_heads * head_dim", [2, 2, 4]),
        ("inner * 2", [7, 2]),
    ],
)
def test_a_product_is_read_from_the_nearest_owner_that_has_its_names(words: str, factors: list[int]) -> None:
    nearest, around = SimpleNamespace(inner=7, head_dim=nn.Identity()), SimpleNamespace(**vars(OWNER), inner=9)
    assert product_of(words, [nearest, around]) == factors  # a module of that name is no number


def test_a_sum_of_products_is_read_and_a_name_that_nobody_has_is_told() -> None:
    assert sum_of("num_heads * head_dim + 2 * kv_heads * head_dim + 1", [OWNER]) == 16 + 16 + 1
    with pytest.raises(AttributeError, match="no module around has a number groups"):
        sum_of("num_heads + groups", [OWNER])


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), min_size=1, max_size=4), st.integers(1, 8))
def test_drawn_segments_are_put_together_again_and_used_by_whole_units(sizes: list[tuple[int, int]], size: int) -> None:
    starts = [sum(units * width for units, width in sizes[:index]) for index in range(len(sizes))]
    found = [Segment(start=start, units=u, width=w) for start, (u, w) in zip(starts, sizes, strict=True)]
    if not all(segment.fits(size) for segment in found):
        return
    total = sum(units * width for units, width in sizes)
    whole, again = torch.arange(1, total + 1), torch.zeros(total, dtype=torch.long)
    for rank in ranks(size):
        shard = shard_of_segments(found, (total,), 0, rank)
        shard.put(shard.take(whole), again)
        for segment in found:
            start, stop = (end - segment.start for end in segment.used(rank))
            assert start % segment.width == 0 == stop % segment.width and stop > start
            first, last = (end - segment.start for end in segment.share(rank))
            assert start <= first < last <= stop  # a rank uses what it holds
    assert torch.equal(again, whole)
