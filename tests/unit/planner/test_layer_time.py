"""Seconds of a layer in narrow precisions, and of the traffic within it."""

from dataclasses import replace

import pytest

from harness.planner.hardware import Link, load_hardware
from harness.planner.layer_time import BACKWARD_RATE, layer_seconds, layer_traffic
from harness.planner.shape import DecoderShape, LayerShape
from harness.planner.workload import Habits, Strategy, Workload

FUSED = Habits(fused_elementwise=True)
DENSE = LayerShape(hidden=64, heads=4, kv_heads=4, query=64, key=64, value=64, output=64, ffn=256)


def test_narrow_products_are_paid_with_casts_in_both_layouts():
    memory = 1e6
    slow = replace(load_hardware("h100"), dispatch_seconds=0.0, kernel_seconds=0.0, memory_bytes_per_second=memory)
    slow = replace(slow, flops=dict.fromkeys(slow.flops, 1e30))
    layer, tokens = replace(DENSE, hidden=1024, ffn=2048), 16
    work = Workload(shape=DecoderShape(layers=(layer,), vocab=64), sequence=tokens, habits=FUSED)
    narrow = layer_seconds(slow, replace(work, precision="fp8"), Strategy(), layer)
    wide = layer_seconds(slow, work, Strategy(), layer)
    into = [(1024, 192), (64, 1024), (1024, 4096), (2048, 1024)]  # inner dimension and columns of the products
    cast = 4 * tokens * (2 * 1024 + 64 + 2048)  # inputs: read in 16 bits, written twice in 8
    less = sum(inner * (tokens + columns) for inner, columns in into)  # inputs and weights are read in 8 bits
    assert (narrow.forward - wide.forward) * memory == pytest.approx(cast - less)


def test_each_expert_that_is_multiplied_by_itself_starts_its_own_kernels():
    start = 1.0
    device = replace(load_hardware("h100"), dispatch_seconds=0.0, kernel_seconds=start)
    layer = replace(DENSE, ffn=0, experts=8, top_k=2, expert_ffn=32)
    work = Workload(shape=DecoderShape(layers=(layer,), vocab=64), sequence=16, habits=FUSED)
    grouped = layer_seconds(device, work, Strategy(), layer)
    apart = layer_seconds(device, replace(work, habits=replace(FUSED, grouped_experts=False)), Strategy(), layer)
    assert apart.forward - grouped.forward == pytest.approx(2 * (8 - 1) * start)
    assert apart.backward - grouped.backward == pytest.approx(4 * (8 - 1) * start)


@pytest.mark.parametrize(("again", "forward", "backward"), [(False, 3 / 4, 3 / 4), (True, 3 / 4, 2 / 3)])
def test_gathers_in_the_precision_of_the_products_have_half_the_bytes(again, forward, backward):
    wires = replace(load_hardware("h100"), node=Link(bytes_per_second=1.0, hop_seconds=1e-9))
    work = Workload(shape=DecoderShape(layers=(DENSE,), vocab=64), sequence=16, precision="fp8")
    wide = Strategy(tp_size=4, sequence_parallel=True)
    work = replace(work, habits=Habits(gathers_again=again))
    as_narrow = replace(work, habits=Habits(gathers_again=again, narrow_gathers=True))
    whole = layer_traffic(wires, work, wide, DENSE)
    narrow = layer_traffic(wires, as_narrow, wide, DENSE)
    assert narrow.forward == pytest.approx(forward * whole.forward)
    assert narrow.backward == pytest.approx(backward * whole.backward)
    in_bf16, both = replace(work, precision="bf16"), replace(as_narrow, precision="bf16")
    assert layer_traffic(wires, both, wide, DENSE) == layer_traffic(wires, in_bf16, wide, DENSE)


def test_attention_by_torch_is_as_fast_as_torch_s_kernels_are_on_the_device():
    layer = replace(DENSE, query=4096, key=1024, value=1024, output=4096)
    work = Workload(shape=DecoderShape(layers=(layer,), vocab=64), sequence=65536)
    device = replace(load_hardware("h100"), dispatch_seconds=0.0, kernel_seconds=0.0)
    best = layer_seconds(device, replace(work, habits=Habits(torch_attention=False)), Strategy(), layer)
    torch = layer_seconds(device, replace(work, habits=Habits()), Strategy(), layer)
    once = 2.0 * 65536 * 32768 * 2 * 4096 / device.flops["bf16"]
    slower = 1 / device.torch_attention_efficiency - 1 / device.attention_efficiency
    assert torch.forward - best.forward == pytest.approx(once * slower)
    assert torch.backward - best.backward == pytest.approx(2.5 * once * slower / BACKWARD_RATE)


def test_a_norm_in_16_bits_moves_what_its_python_code_computes_in_float32() -> None:
    """transformers' RMSNorm: 36 bytes an element forward, 92 backward; LayerNorm, one kernel: 4 and 8."""
    slow = replace(load_hardware("h100"), dispatch_seconds=0.0, kernel_seconds=0.0, memory_bytes_per_second=1e6)
    work = Workload(shape=DecoderShape(layers=(DENSE,), vocab=64), sequence=16)
    written_out, native = (
        layer_seconds(slow, work, Strategy(micro_batch=4), replace(DENSE, native_norms=is_native))
        for is_native in (False, True)
    )
    elements = DENSE.norms * DENSE.hidden * 4 * 16
    assert written_out.forward - native.forward == pytest.approx((36 - 4) * elements / 1e6)
    assert written_out.backward - native.backward == pytest.approx((92 - 8) * elements / 1e6)
