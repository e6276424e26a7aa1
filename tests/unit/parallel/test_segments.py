"""Segments of unequal width: each entry is held once, and a rank uses whole units."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.errors import UserError
from harness.parallel.comm import TensorParallel
from harness.parallel.tensor.segments import cut_segments, read_segments, shard_of_segments, sum_of
from harness.parallel.tensor.shard import shard_of

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
