"""The orders of all schedules by their names in `pipeline.schedule`. The first is that of DeepSpeed's own schedule."""

from __future__ import annotations

from collections.abc import Mapping

from harness.config.values import layout_keys
from harness.parallel.pipeline.schedules.folded import dualpipe_v, zero_bubble_v
from harness.parallel.pipeline.schedules.interleaved import interleaved
from harness.parallel.pipeline.schedules.passes import Order, gpipe, one_forward_one_backward, zero_bubble_h1

ORDERS: Mapping[str, Order] = {
    layout_keys.DEEPSPEED_1F1B: one_forward_one_backward,
    layout_keys.GPIPE: gpipe,
    layout_keys.ZERO_BUBBLE: zero_bubble_h1,
    layout_keys.INTERLEAVED: interleaved,
    layout_keys.ZERO_BUBBLE_V: zero_bubble_v,
    layout_keys.DUALPIPE_V: dualpipe_v,
}
