"""Seconds of a layer where its host issues operations more slowly than the device runs them."""

from dataclasses import replace

import pytest

from harness.planner.hardware import Link, load_hardware
from harness.planner.layer_time import COLLECTIVE_OPERATIONS, OPERATIONS, layer_seconds, layer_traffic
from harness.planner.shape import DecoderShape, LayerShape
from harness.planner.workload import Strategy, Workload

SLOW_HOST = replace(load_hardware("h100"), dispatch_seconds=1.0)
WIDTHS = dict(hidden=64, heads=4, kv_heads=4, query=64, key=64, value=64, output=64)
DENSE = LayerShape(**WIDTHS, ffn=256)
SPARSE = LayerShape(**WIDTHS, experts=32, top_k=2, expert_ffn=64)


def issued(layer: LayerShape, strategy: Strategy, **workload: object) -> float:
    """Return the operations of a layer's forward; a backward issues twice as many."""
    work = Workload(**{"shape": DecoderShape(layers=(layer,), vocab=64), "sequence": 16, **workload})
    seconds = layer_seconds(SLOW_HOST, work, strategy, layer)
    assert seconds.backward == 2 * seconds.forward
    return seconds.forward


def test_a_host_issues_two_collectives_with_a_cut_layer():
    assert issued(DENSE, Strategy()) == OPERATIONS
    assert issued(DENSE, Strategy(tensor=2)) == OPERATIONS + 2 * COLLECTIVE_OPERATIONS


@pytest.mark.parametrize(("precision", "each"), [("bf16", 2), ("fp8", 4)])
@pytest.mark.parametrize(("ranks", "held"), [(1, 32), (8, 4)])
def test_experts_that_are_multiplied_one_by_one_are_issued_one_by_one(precision, each, ranks, held):
    strategy = Strategy(data=ranks, expert=ranks)
    assert issued(SPARSE, strategy, precision=precision) == 2 * OPERATIONS
    one_by_one = issued(SPARSE, strategy, precision=precision, grouped_experts=False)
    assert one_by_one == 2 * OPERATIONS + each * held


@pytest.mark.parametrize(("again", "forward", "backward"), [(False, 3 / 4, 3 / 4), (True, 3 / 4, 2 / 3)])
def test_gathers_in_the_precision_of_the_products_have_half_the_bytes(again, forward, backward):
    wires = replace(SLOW_HOST, node=Link(bytes_per_second=1.0, hop_seconds=1e-9))
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
