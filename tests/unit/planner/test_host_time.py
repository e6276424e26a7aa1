"""Seconds of a layer where its host issues operations more slowly than the device runs them, or is the device."""

from dataclasses import replace

import pytest

from harness.planner.hardware import load_hardware
from harness.planner.layer_time import (
    COLLECTIVE_OPERATIONS,
    EXCHANGE_OPERATIONS,
    HOST_COLLECTIVE,
    HOST_LAYER,
    HOST_MICRO_BATCH,
    HOST_RECOMPUTED,
    HOST_UPDATE,
    HOST_ZERO_3,
    OPERATIONS,
    layer_seconds,
    micro_batch_issue,
    update_issue,
)
from harness.planner.shape import DecoderShape, LayerShape
from harness.planner.workload import Habits, Strategy, Workload

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
    assert issued(DENSE, Strategy(tp_size=2)) == OPERATIONS + 2 * COLLECTIVE_OPERATIONS


@pytest.mark.parametrize(("precision", "each"), [("bf16", 2), ("fp8", 4)])
@pytest.mark.parametrize(("ranks", "held"), [(1, 32), (8, 4)])
def test_experts_that_are_multiplied_one_by_one_are_issued_one_by_one(precision, each, ranks, held):
    strategy = Strategy(dp_size=ranks, ep_size=ranks)
    sent = EXCHANGE_OPERATIONS if ranks > 1 else 0
    assert issued(SPARSE, strategy, precision=precision) == 2 * OPERATIONS + sent
    one_by_one = issued(SPARSE, strategy, precision=precision, habits=Habits(grouped_experts=False))
    assert one_by_one == 2 * OPERATIONS + sent + each * held


@pytest.mark.parametrize(
    ("strategy", "forward", "backward"),
    [
        pytest.param(Strategy(), 0, 0, id="plain"),
        pytest.param(Strategy(tp_size=2), 2 * HOST_COLLECTIVE, 2 * HOST_COLLECTIVE, id="two sums each way"),
        pytest.param(
            Strategy(tp_size=2, sequence_parallel=True), 4 * HOST_COLLECTIVE, 4 * HOST_COLLECTIVE, id="gathered, too"
        ),
        pytest.param(Strategy(recompute="full"), 0, HOST_RECOMPUTED, id="recomputed"),
        pytest.param(Strategy(dp_size=2, zero_stage=2), 0, 0, id="ZeRO-2 has no hooks on layers"),
        pytest.param(Strategy(dp_size=2, zero_stage=3), HOST_ZERO_3 / 2, HOST_ZERO_3 / 2, id="ZeRO-3 has"),
    ],
)
def test_a_host_that_is_the_device_does_both_one_after_the_other(strategy, forward, backward):
    host = replace(SLOW_HOST, compute_units=1, flops={"bf16": 1e30}, memory_bytes_per_second=1e30, kernel_seconds=0.0)
    work = Workload(shape=DecoderShape(layers=(DENSE,), vocab=64), sequence=16)
    seconds = layer_seconds(host, work, strategy, DENSE)
    assert (seconds.forward, seconds.backward) == pytest.approx(
        (OPERATIONS + HOST_LAYER / 2 + forward, 2 * OPERATIONS + HOST_LAYER / 2 + backward)
    )
    slower = layer_seconds(replace(host, kernel_seconds=1.0), work, strategy, DENSE)
    assert slower.forward > seconds.forward and slower.backward > seconds.backward


def test_what_a_host_does_beside_layers_counts_where_it_is_the_device():
    host = replace(SLOW_HOST, compute_units=1)
    assert (micro_batch_issue(SLOW_HOST), update_issue(SLOW_HOST, 3)) == (0.0, 0.0)
    assert (micro_batch_issue(host), update_issue(host, 3)) == (HOST_MICRO_BATCH, 3 * HOST_UPDATE)
