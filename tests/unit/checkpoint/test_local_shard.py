"""What a rank holds of a tensor, as boxes of the whole: all ranks write each element once, and read it back."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checkpoint.tensors.local_shard import LocalShard
from harness.checkpoint.tensors.tensor_writer import Entry, OpenFiles, create, file_regions
from harness.deepspeed.flat_tensors import FlatPartition, ParameterSlice
from harness.hf.weights.tensor_files import open_weights_file
from harness.parallel.tensor.shard import Shard, share_of


def parts(whole: torch.Tensor, shard: Shard | None, ranks: int) -> list[LocalShard]:
    """What each of `ranks` data-parallel ranks holds of a shard, cut as ZeRO-3 cuts it."""
    local = whole if shard is None else shard.take(whole)
    total = local.numel()
    size = -(-total // ranks)
    held = []
    for rank in range(ranks):
        start = min(rank * size, total)
        values = local.reshape(-1)[start : min(start + size, total)].clone()
        held.append(LocalShard(name="w", shape=tuple(local.shape), shard=shard, start=start, values=values, owned=True))
    return held


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Shard | None], int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    size, packed = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    cut = [dim for dim, width in enumerate(shape) if width >= size * packed and width % packed == 0]
    ranks = draw(st.integers(1, 4))
    if size == 1 or not cut:
        return shape, [None], ranks
    dim, multiple = draw(st.sampled_from(cut)), draw(st.sampled_from((1, 4)))
    return shape, [share_of(shape, dim, rank, size, parts=packed, multiple=multiple) for rank in range(size)], ranks


@given(layouts())
@settings(max_examples=60)
def test_the_pieces_of_all_ranks_are_the_whole_each_element_once(
    layout: tuple[tuple[int, ...], list[Shard | None], int],
) -> None:
    shape, shards, ranks = layout
    whole = torch.arange(1.0, prod(shape) + 1).view(shape)
    found, count = torch.zeros(shape), torch.zeros(shape)
    for held in (held for shard in shards for held in parts(whole, shard, ranks)):
        for box, values in held.pieces():
            index = tuple(slice(*span) for span in box)
            found[index] = values
            count[index] += 1
    assert torch.equal(found, whole)
    assert torch.equal(count, torch.ones(shape))


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_one_layout_writes_another_reads(tmp_path: Path, ranks: int) -> None:
    whole = torch.randn(12, 10)
    path = tmp_path / "w.safetensors"
    header, (region,) = file_regions(path, [Entry(name="w", shape=(12, 10), dtype=torch.float32, trained=True)])
    create(path, header, [region])
    with OpenFiles(several_hosts=False) as opened:
        for held in (held for rank in range(2) for held in parts(whole, share_of((12, 10), 1, rank, 2), 3)):
            for box, values in held.pieces():
                opened.write(region, [start for start, _ in box], values)
    stored = next(open_weights_file(path)["w"].leaves())
    for shard in (None, *(share_of((12, 10), 0, rank, 3) for rank in range(3))):
        wanted = parts(whole, shard, ranks)
        for held, blank in zip(wanted, parts(torch.zeros(12, 10), shard, ranks), strict=True):
            for box, values in blank.pieces():
                stored.read(values, box)  # into views of what the rank holds
            assert torch.equal(blank.values, held.values)


def test_a_scalar_is_one_piece() -> None:
    (piece,) = LocalShard(name="s", shape=(), shard=None, start=0, values=torch.tensor([2.0]), owned=True).pieces()
    assert piece[0] == ()
    assert piece[1].shape == ()


def test_a_part_of_several_tensors_is_not_taken_for_one_that_has_its_shape() -> None:
    group: Any = object()
    part, first, second = torch.arange(1.0, 65.0), torch.zeros(64), torch.zeros(64)  # two norms on two ranks
    updated = FlatPartition(part, [first, second], [0, 64], group)

    def pieces(parameter: torch.Tensor, length: int) -> list[torch.Tensor]:
        run = ParameterSlice(parameter=parameter, shape=(64,), start=0, length=length, offset=0, group=group)
        held = LocalShard(name="w", shape=(64,), shard=None, start=0, values=part, owned=True, updated=(updated, run))
        return [values for _, values in held.of_state(part).pieces() if values.numel()]

    assert torch.equal(torch.cat(pieces(first, 64)), part)
    assert pieces(second, 0) == []
