"""The schedules of the harness by their names in `pipeline.schedule`; the default, DeepSpeed's own, is not here."""

from __future__ import annotations

from collections.abc import Mapping

from harness.config.values import layout_keys
from harness.parallel.pipeline.schedules.folded import dualpipe_v, zero_bubble_v
from harness.parallel.pipeline.schedules.interleaved import interleaved, interleaved_zero_bubble, looped_bfs
from harness.parallel.pipeline.schedules.passes import Order, gpipe, one_forward_one_backward, zero_bubble_h1

ORDERS: Mapping[str, Order] = {
    layout_keys.NON_WAITING_1F1B: one_forward_one_backward,
    layout_keys.GPIPE: gpipe,
    layout_keys.ZERO_BUBBLE: zero_bubble_h1,
    layout_keys.LOOPED_BFS: looped_bfs,
    layout_keys.INTERLEAVED: interleaved,
    layout_keys.INTERLEAVED_ZERO_BUBBLE: interleaved_zero_bubble,
    layout_keys.ZERO_BUBBLE_V: zero_bubble_v,
    layout_keys.DUALPIPE_V: dualpipe_v,
}
