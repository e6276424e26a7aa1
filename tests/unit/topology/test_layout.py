"""The arithmetic of ranks, held to DeepSpeed's own and to properties that any layout must have."""

import re

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.topology.layout import AXES, AXIS_SIZES, Layout

SIZES = st.integers(1, 5)
LAYOUTS = st.builds(lambda p, t, d: Layout(pp_size=p, tp_size=t, dp_size=d), SIZES, SIZES, SIZES)
DEEPSPEED_AXIS = {"pipeline": "pipe", "data": "data", "tensor": "model"}


@given(LAYOUTS)
def test_ranks_and_groups_are_those_of_deepspeed(layout: Layout) -> None:
    theirs = PipeModelDataParallelTopology(num_pp=layout.pp_size, num_mp=layout.tp_size, num_dp=layout.dp_size)
    for rank in range(layout.world_size):
        place, expected = layout.coordinate(rank), theirs.get_coord(rank)
        assert (place.stage, place.dp_rank, place.tp_rank) == (expected.pipe, expected.data, expected.model)
        assert layout.rank(stage=place.stage, dp_rank=place.dp_rank, tp_rank=place.tp_rank) == rank
    for axis in AXES:
        if layout.sizes()[axis] > 1:  # DeepSpeed lists no groups of one
            assert sorted(layout.groups(axis)) == sorted(theirs.get_axis_comm_lists(DEEPSPEED_AXIS[axis]))
    for stage in range(layout.pp_size):
        assert layout.stage_ranks(stage) == sorted(theirs.get_axis_list("pipe", stage))


@given(LAYOUTS)
def test_the_groups_of_an_axis_hold_every_rank_once(layout: Layout) -> None:
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert groups == sorted(groups)
        assert all(layout.ranks_along(axis, rank) == group for group in groups for rank in group)


@given(LAYOUTS, st.integers(1, 5))
def test_experts_are_dealt_among_neighbours_and_held_by_the_others(layout: Layout, size: int) -> None:
    dealt = Layout(
        pp_size=layout.pp_size, tp_size=layout.tp_size, dp_size=layout.dp_size * size, ep_size=layout.tp_size * size
    )
    assert dealt.ep_data_size == size
    for groups, length in ((dealt.expert_groups(), size), (dealt.expert_copies(), layout.dp_size)):
        assert sorted(rank for group in groups for rank in group) == list(range(dealt.world_size))
        assert {len(group) for group in groups} == {length}
        assert all(set(group) <= set(dealt.ranks_along("data", group[0])) for group in groups)


def test_neighbours_that_share_out_experts_are_next_to_each_other() -> None:
    layout = Layout(dp_size=4, tp_size=2, ep_size=4)
    assert layout.expert_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert layout.expert_copies() == [[0, 4], [2, 6], [1, 5], [3, 7]]
    with pytest.raises(
        UserError, match="expert-parallel size 3 does not fit tensor-parallel size 1 x data-parallel size 4"
    ):
        Layout(dp_size=4, ep_size=3)


def test_neighbouring_ranks_share_a_tensor_group() -> None:
    layout = Layout(pp_size=2, tp_size=2, dp_size=2)
    assert layout.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.ranks_along("data", 7) == [5, 7]
    assert str(layout) == "pp2 x dp2 x tp2"
    assert str(layout.coordinate(6)) == "stage 1, data 1, tensor 0"


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tensor": 0}, "tensor parallel size is 0"),
        ({"pipeline": -2}, "pipeline parallel size is -2"),
        ({"data": 1.5}, "data parallel size is 1.5"),
        ({"tensor": True}, "tensor parallel size is True"),
        ({"pipeline": "2"}, "pipeline parallel size is '2'"),
    ],
)
def test_a_size_that_is_no_count_is_refused(sizes: dict, text: str) -> None:
    with pytest.raises(UserError, match=text):
        Layout(**{AXIS_SIZES[axis]: size for axis, size in sizes.items()})


def test_data_takes_what_pipeline_and_tensor_leave() -> None:
    assert Layout.from_world(8, pp_size=2, tp_size=2) == Layout(pp_size=2, tp_size=2, dp_size=2)
    assert Layout.from_world(1) == Layout()


@pytest.mark.parametrize(
    ("world", "pipeline", "tensor", "text"),
    [
        (
            6,
            2,
            2,
            "pipeline 2 x tensor 2 = 4 ranks do not divide the world of 6 ranks: set pipeline to 1 or 3 with "
            "tensor 2, or set tensor to 1 or 3 with pipeline 2, or start a multiple of 4 processes",
        ),
        (
            8,
            3,
            3,
            "pipeline 3 x tensor 3 = 9 ranks do not divide the world of 8 ranks: start a multiple of 9 processes",
        ),
        (
            0,
            2,
            1,
            "a world of 0 ranks cannot hold pipeline 2 x tensor 1 = 2 ranks: start at least 2 processes",
        ),
    ],
)
def test_a_world_that_does_not_fit_is_told_what_would(world: int, pipeline: int, tensor: int, text: str) -> None:
    with pytest.raises(UserError) as error:
        Layout.from_world(world, pp_size=pipeline, tp_size=tensor)
    assert str(error.value) == text


@given(st.integers(1, 64), SIZES, SIZES)
def test_every_size_that_is_advised_fits(world: int, pipeline: int, tensor: int) -> None:
    try:
        Layout.from_world(world, pp_size=pipeline, tp_size=tensor)
    except UserError as error:
        sizes = {"pp_size": pipeline, "tp_size": tensor}
        for axis, advised in re.findall(r"set (\w+) to ([\d or]+) with", str(error)):
            for size in re.findall(r"\d+", advised):
                Layout.from_world(world, **{**sizes, AXIS_SIZES[axis]: int(size)})


def test_places_and_ranks_outside_the_layout_are_index_errors() -> None:
    layout = Layout(pp_size=2, dp_size=2)
    for outside in (-1, 4):
        with pytest.raises(IndexError):
            layout.coordinate(outside)
        with pytest.raises(IndexError):
            layout.ranks_along("data", outside)
    with pytest.raises(IndexError, match="pipeline index 2"):
        layout.rank(stage=2, dp_rank=0, tp_rank=0)
    with pytest.raises(IndexError, match="tensor index 1"):
        layout.rank(stage=0, dp_rank=0, tp_rank=1)


def test_context_ranks_are_neighbours_on_the_data_axis() -> None:
    layout = Layout(pp_size=2, tp_size=2, dp_size=4, cp_size=2)
    assert str(layout) == "pp2 x dp4 (cp2) x tp2"
    assert (layout.batch_ranks, layout.world_size) == (2, 16)
    places = [layout.coordinate(rank) for rank in range(8)]
    assert [(place.batch_rank, place.cp_rank) for place in places[::2]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert layout.ranks_along("context", 5) == [5, 7]
    assert layout.groups("context")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert Layout.from_world(16, pp_size=2, tp_size=2, cp_size=2) == layout


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout(dp_size=3, cp_size=2), "context parallel size 2 does not divide 3 data-parallel ranks"),
        (
            lambda: Layout.from_world(6, tp_size=2, cp_size=2),
            "pipeline 1 x context 2 x tensor 2 = 4 ranks do not divide",
        ),
    ],
)
def test_context_ranks_divide_the_data_ranks(make, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()
