"""Shards: what a rank takes and gives back, with and without copies and padding, from a tensor or from a
file."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from harness.parallel.shard import Shard, cut_parameter, mark, padded_share_of, shard_of, share_of

SIZES = st.integers(1, 5)


@given(
    size=SIZES,
    width=st.integers(1, 3),
    parts=st.integers(1, 3),
    copies=st.integers(1, 3),
    dim=st.integers(-2, 1),
)
def test_what_the_owners_put_back_is_the_whole(size: int, width: int, parts: int, copies: int, dim: int) -> None:
    shape = [3, 3]
    shape[dim] = size * width * parts
    full = torch.arange(shape[0] * shape[1]).view(*shape)
    written = torch.zeros_like(full)
    for rank in range(size * copies):
        shard = share_of((shape[0], shape[1]), dim, rank, size * copies, parts=parts, copies=copies)
        local = shard.take(full)
        assert tuple(local.shape) == shard.local_shape
        if shard.owner:
            found = torch.zeros_like(full)
            shard.put(local, found)
            written += found
    assert torch.equal(written, full)


@given(size=SIZES, total=st.integers(1, 12))
def test_padding_is_zeros_and_is_not_put_back(size: int, total: int) -> None:
    full = torch.arange(1, total + 1).view(total, 1)
    locals_ = []
    for rank in range(size):
        shard = padded_share_of((total, 1), 0, rank, size)
        locals_.append(shard.take(full))
        assert shard.length == -(-total // size)
        target = torch.zeros_like(full)
        shard.put(locals_[-1] + 7, target)
        assert torch.count_nonzero(target) == shard.length - shard.padding
    joined = torch.cat(locals_)
    assert torch.equal(joined[:total], full)
    assert not joined[total:].any()


def test_a_packed_weight_gives_a_share_of_every_part() -> None:
    query, key, value = torch.arange(4), torch.arange(10, 14), torch.arange(20, 24)
    shard = share_of((12,), 0, rank=1, size=2, parts=3)
    assert shard.take(torch.cat([query, key, value])).tolist() == [2, 3, 12, 13, 22, 23]


@pytest.mark.parametrize("dim", [0, 1])
def test_only_its_pieces_are_read_from_a_file(tmp_path: Path, dim: int) -> None:
    full = torch.arange(35.0).view(5, 7)
    save_file({"weight": full}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for rank in range(8):  # more ranks than rows: the last ones hold nothing but padding
            shard = padded_share_of((5, 7), dim, rank, 8)
            assert torch.equal(shard.take(file.get_slice("weight")), shard.take(full))


def test_another_shape_is_told() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 3\) stands where \(4, 2\) is expected"):
        share_of((4, 2), 0, 0, 2).take(torch.zeros(4, 3))


@pytest.mark.parametrize("request_", [{"size": 3}, {"size": 2, "parts": 3}, {"size": 4, "copies": 3}])
def test_what_does_not_divide_is_refused(request_: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        share_of((8, 2), 0, 0, **request_)


def test_a_cut_parameter_tells_its_shard_and_deepspeed_what_to_count() -> None:
    whole = nn.Parameter(torch.arange(8.0).view(4, 2), requires_grad=False)
    owner, copy = (cut_parameter(whole, share_of((4, 2), 0, rank, 4, copies=2)) for rank in (2, 3))
    assert torch.equal(owner, copy)
    assert (owner.tensor_model_parallel, copy.tensor_model_parallel) == (True, False)  # type: ignore[attr-defined]
    assert not owner.requires_grad
    assert shard_of(whole) is None


def test_a_meta_parameter_is_cut_and_its_successor_can_be_marked() -> None:
    shard = padded_share_of((5, 2), 0, 1, 2)
    local = cut_parameter(nn.Parameter(torch.empty(5, 2, device="meta")), shard)
    assert local.is_meta
    assert local.shape == (3, 2)
    successor = mark(nn.Parameter(torch.empty(local.shape)), shard_of(local))
    assert shard_of(successor) == Shard(full_shape=(5, 2), dim=0, pieces=((3, 5),), padding=1)
    assert shard_of(mark(nn.Parameter(torch.empty(1)), None)) is None
