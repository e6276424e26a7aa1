"""Seconds of a layer in narrow precisions, and of the traffic within it."""

from dataclasses import replace

import pytest

from harness.planner.compute import matmul
from harness.planner.hardware import Link, load_hardware
from harness.planner.layer_time import BACKWARD_RATE, layer_seconds, layer_traffic
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


def test_fused_experts_neither_move_their_activation_nor_narrow_it():
    memory = 1e6
    slow = replace(load_hardware("h100"), dispatch_seconds=0.0, kernel_seconds=0.0, memory_bytes_per_second=memory)
    layer, tokens = replace(DENSE, ffn=0, experts=4, top_k=2, expert_ffn=32), 16
    work = Workload(shape=DecoderShape(layers=(layer,), vocab=64), sequence=tokens, precision="fp8")
    work = replace(work, fused_elementwise=True, replayed=True)
    apart = layer_seconds(slow, work, Strategy(), layer)
    fused = layer_seconds(slow, replace(work, fused_experts=True), Strategy(), layer)
    each = 2 * 3 + 4  # an activation reads twice and writes once, in 16 bits; then it is read, and written twice in 8
    assert (apart.forward - fused.forward) * memory == pytest.approx(each * 2 * 32 * tokens)


def test_only_the_products_of_compressed_queries_keys_and_values_are_computed_again():
    h100 = replace(load_hardware("h100"), dispatch_seconds=0.0)
    widths = dict(heads=128, kv_heads=128, query=128 * 192, key=128 * 192, value=128 * 128, output=128 * 128)
    layer = LayerShape(hidden=7168, q_rank=1536, kv_rank=512, rope=64, ffn=18432, **widths)
    work = Workload(shape=DecoderShape(layers=(layer,), vocab=64), sequence=4096)
    kept = layer_seconds(h100, work, Strategy(), layer)
    again = layer_seconds(h100, work, Strategy(recompute="up"), layer)
    up = [matmul(h100, "bf16", 4096, 1536, 128 * 192), matmul(h100, "bf16", 4096, 512, 128 * 256)]
    assert again.forward == kept.forward
    assert again.backward - kept.backward == pytest.approx(sum(up))
    dense = layer_seconds(h100, work, Strategy(recompute="up"), DENSE)
    assert dense == layer_seconds(h100, work, Strategy(), DENSE)


def test_each_expert_that_is_multiplied_by_itself_starts_its_own_kernels():
    start = 1.0
    device = replace(load_hardware("h100"), dispatch_seconds=0.0, kernel_seconds=start)
    layer = replace(DENSE, ffn=0, experts=8, top_k=2, expert_ffn=32)
    work = Workload(shape=DecoderShape(layers=(layer,), vocab=64), sequence=16, fused_elementwise=True)
    grouped = layer_seconds(device, work, Strategy(), layer)
    apart = layer_seconds(device, replace(work, grouped_experts=False), Strategy(), layer)
    assert apart.forward - grouped.forward == pytest.approx(2 * (8 - 1) * start)
    assert apart.backward - grouped.backward == pytest.approx(4 * (8 - 1) * start)


@pytest.mark.parametrize(("speeds", "ratios"), [((0.5, 1.0), (2, 1)), ((1.0, 0.25), (1, 4))])
def test_a_slower_kernel_of_attention_counts_in_its_own_pass(speeds, ratios):
    device = replace(load_hardware("h100"), dispatch_seconds=0.0, kernel_seconds=0.0)
    layer = replace(DENSE, query=4096, key=1024, value=1024, output=4096)
    work = Workload(shape=DecoderShape(layers=(layer,), vocab=64), sequence=65536)
    best = layer_seconds(device, work, Strategy(), layer)
    forward, backward = speeds
    slow = replace(work, attention_speed=forward, attention_backward_speed=backward)
    seconds = layer_seconds(device, slow, Strategy(), layer)
    once = 2.0 * 65536 * 32768 * 2 * 4096 / (device.flops["bf16"] * device.attention_efficiency)
    assert seconds.forward - best.forward == pytest.approx((ratios[0] - 1) * once)
    assert seconds.backward - best.backward == pytest.approx((ratios[1] - 1) * 2.5 * once / BACKWARD_RATE)


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
