"""Seconds of a layer in narrow precisions, and of the traffic within it."""

from dataclasses import replace

import pytest

from harness.planner.hardware import Link, load_hardware
from harness.planner.layer_time import layer_seconds, layer_traffic
from harness.planner.shape import DecoderShape, LayerShape
from harness.planner.workload import Strategy, Workload

DENSE = LayerShape(hidden=64, heads=4, kv_heads=4, query=64, key=64, value=64, output=64, ffn=256)


def test_narrow_products_are_paid_with_casts_in_both_layouts():
    memory = 1e6
    slow = replace(load_hardware("h100"), dispatch_seconds=0.0, kernel_seconds=0.0, memory_bytes_per_second=memory)
    slow = replace(slow, flops=dict.fromkeys(slow.flops, 1e30))
    layer, tokens = replace(DENSE, hidden=1024, ffn=2048), 16
    work = Workload(shape=DecoderShape(layers=(layer,), vocab=64), sequence=tokens, fused_elementwise=True)
    narrow = layer_seconds(slow, replace(work, precision="fp8"), Strategy(), layer)
    wide = layer_seconds(slow, work, Strategy(), layer)
    into = [(1024, 192), (64, 1024), (1024, 4096), (2048, 1024)]  # inner dimension and columns of the products
    cast = 4 * tokens * (2 * 1024 + 64 + 2048)  # inputs: read in 16 bits, written twice in 8
    less = sum(inner * (tokens + columns) for inner, columns in into)  # inputs and weights are read in 8 bits
    assert (narrow.forward - wide.forward) * memory == pytest.approx(cast - less)


@pytest.mark.parametrize(("again", "forward", "backward"), [(False, 3 / 4, 3 / 4), (True, 3 / 4, 2 / 3)])
def test_gathers_in_the_precision_of_the_products_have_half_the_bytes(again, forward, backward):
    wires = replace(load_hardware("h100"), node=Link(bytes_per_second=1.0, hop_seconds=1e-9))
    work = Workload(shape=DecoderShape(layers=(DENSE,), vocab=64), sequence=16, precision="fp8")
    wide = Strategy(tensor=4, sequence_parallel=True, gathers_again=again)
    whole = layer_traffic(wires, work, wide, DENSE)
    narrow = layer_traffic(wires, work, replace(wide, narrow_gathers=True), DENSE)
    assert narrow.forward == pytest.approx(forward * whole.forward)
    assert narrow.backward == pytest.approx(backward * whole.backward)
    in_bf16 = replace(work, precision="bf16")
    assert layer_traffic(wires, in_bf16, replace(wide, narrow_gathers=True), DENSE) == layer_traffic(
        wires, in_bf16, wide, DENSE
    )
