"""Ids of several arrays as one run: whatever is asked of them, they are those of the arrays joined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.data.blocks import Blocks, TokenIds, positions_of

documents = st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=5)  # lengths, array by array


def made(lengths: list[list[int]]) -> tuple[TokenIds, np.ndarray, np.ndarray]:
    """The ids of documents of these lengths in several arrays; all of them joined, and where documents begin."""
    arrays = [own for own in lengths if own]  # a shard without ids is left out
    sizes = [sum(own) for own in arrays]
    joined = np.arange(sum(sizes), dtype=np.uint16)
    ids = np.split(joined, np.cumsum(sizes)[:-1]) if sizes else []
    starts = [np.cumsum([0, *own[:-1]]).astype(np.int64) for own in arrays]
    flat = [length for own in arrays for length in own]
    return TokenIds(ids, starts), joined, np.cumsum([0, *flat[:-1]]) if flat else np.empty(0, dtype=np.int64)


@given(documents, st.data())
def test_any_stretch_is_that_of_the_whole(lengths: list[list[int]], data: st.DataObject) -> None:
    found, joined, begins = made(lengths)
    assert len(found) == len(joined)
    start = data.draw(st.integers(0, max(len(joined) - 1, 0)))
    stop = data.draw(st.integers(start, len(joined)))
    if stop > start:
        ids = found.ids(start, stop)
        assert ids.dtype == np.int64 and ids.tolist() == joined[start:stop].tolist()
    assert found.starts(start, stop).tolist() == [begin - start for begin in begins if start <= begin < stop]


@given(documents, st.integers(2, 7))
def test_positions_begin_anew_with_each_document_and_each_block(lengths: list[list[int]], size: int) -> None:
    found, joined, begins = made(lengths)
    if len(joined) < size:
        return
    blocks = Blocks(found, size, packing=True)
    assert len(blocks) == len(joined) // size
    for number in range(len(blocks)):
        block, first = blocks[number], number * size
        assert block["input_ids"].tolist() == joined[first : first + size].tolist()
        wanted = [place - max([first, *(b for b in begins if b <= place)]) for place in range(first, first + size)]
        assert block["position_ids"].tolist() == wanted


@pytest.mark.parametrize(
    ("starts", "positions"),
    [
        ([], [0, 1, 2, 3, 4]),
        ([0], [0, 1, 2, 3, 4]),
        ([4], [0, 1, 2, 3, 0]),
        ([1, 2, 4], [0, 0, 0, 1, 0]),
        ([0, 1, 2, 3, 4], [0, 0, 0, 0, 0]),
    ],
)
def test_positions_of_a_block(starts: list[int], positions: list[int]) -> None:
    assert positions_of(np.array(starts, dtype=np.int64), 5).tolist() == positions


def test_ids_beyond_the_end_are_none() -> None:
    found, _, _ = made([[3], [2]])
    with pytest.raises(IndexError):
        found.ids(3, 6)
    assert found.starts(0, 0).tolist() == []
