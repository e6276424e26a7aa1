"""The layouts that are tried for fewer ranks, and the flags that set them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.command_line.fewer_ranks import _flags, _smaller
from harness.topology.layout import Layout

SIZES = st.integers(1, 4)


@settings(max_examples=40)
@given(SIZES, SIZES, SIZES, st.integers(0, 64))
def test_each_layout_that_fits_is_tried_once_and_the_best_first(pp: int, tp: int, dp: int, ranks: int) -> None:
    whole = Layout(pp_size=pp, tp_size=tp, dp_size=dp)
    tried = list(_smaller(whole, ranks))
    assert len({str(layout) for layout in tried}) == len(tried)
    assert all(layout.world_size <= ranks and tp % layout.tp_size == 0 and layout.pp_size <= pp for layout in tried)
    order = [(layout.tp_size, layout.pp_size, layout.dp_size) for layout in tried]
    assert order == sorted(order, reverse=True)
    assert bool(tried) == (ranks > 0)
    if ranks >= whole.world_size:
        assert (tp, pp, dp) in order  # nothing has to be given up


def test_experts_stay_with_the_tensor_parallel_ranks() -> None:
    whole = Layout(pp_size=1, tp_size=4, dp_size=2, ep_size=4)
    assert [(layout.tp_size, layout.ep_size) for layout in _smaller(whole, 4)][:2] == [(4, 4), (2, 2)]
    assert _flags(whole, whole, 32) == {
        "--pipeline_parallel_size": "1",
        "--tensor_parallel_size": "4",
        "--expert_parallel_size": "4",
        "--global_batch_size": "32",
    }
    plain = Layout(pp_size=1, tp_size=4, dp_size=2)
    assert "--expert_parallel_size" not in _flags(plain, plain, 32)


def test_experts_stay_on_as_many_data_ranks_as_are_left() -> None:
    whole = Layout(dp_size=4, ep_size=4)
    left = list(_smaller(whole, 3))
    assert [(layout.dp_size, layout.ep_size) for layout in left] == [(3, 3), (2, 2), (1, 1)]
    assert _flags(left[-1], whole, 32)["--expert_parallel_size"] == "1"  # the config asks for 4
    assert [layout.ep_size for layout in _smaller(Layout(dp_size=4, ep_size=2), 4)] == [2, 1, 2, 1]


def test_ranks_that_share_a_sequence_stay_together_while_they_can() -> None:
    whole = Layout(pp_size=1, tp_size=1, dp_size=8, cp_size=4)
    tried = [(layout.cp_size, layout.dp_size) for layout in _smaller(whole, 6)]
    assert tried[:3] == [(4, 4), (2, 6), (2, 4)]
    left = Layout(dp_size=6)
    assert _flags(left, whole, 32)["--context_parallel_size"] == "1", "it overrides what the config says"
    assert "--context_parallel_size" not in _flags(left, left, 32)
