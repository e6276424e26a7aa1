"""Bytes that come and go within a step: worked from what DeepSpeed allocates for a stage of known sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.extras import host_memory
from harness.planner.memory import (
    FLAT_BUCKET,
    GATHERED,
    SHARED_PIECE,
    SUB_GROUP,
    StageLoad,
    passing_bytes,
    shared_bytes,
    stage_memory,
)
from harness.planner.shape import DecoderShape, LayerShape
from harness.planner.workload import HABITS, Stage, Strategy, Workload

LAYER = LayerShape(hidden=10, heads=1, kv_heads=1, query=10, key=10, value=10, output=10, ffn=100)  # a matrix of 1000
SHAPE = DecoderShape(layers=(LAYER,), vocab=0)
STAGE = Stage(layers=((LAYER, 2),), is_first=False, is_last=False)
HELD, LARGEST = 1e6, 1000


def passing(
    strategy: Strategy, gradients: float, made: float = 0.0, held: float = HELD, layer: float = 0.0, **changes: object
) -> float:
    """Bytes for a stage that holds so many parameters, of which 300 belong to its first layer."""
    work = Workload(shape=SHAPE, sequence=1, **{"precision": "fp32", **changes})  # type: ignore[arg-type]
    own = held / strategy.dp_size
    step = StageLoad(
        parameters=held, own=own, gradients=gradients, made=made, layer=layer, below=300, gathered=held, in_flight=1
    )
    return passing_bytes(work, strategy, STAGE, step)


@pytest.mark.parametrize(
    ("strategy", "gradients", "made", "bytes_"),
    [
        pytest.param(Strategy(accumulation=2), 4e6, 9e6, 9e6 + 4000, id="the second backward: whole sums are there"),
        pytest.param(Strategy(), 4e6, 9e6, 5e6 + 4000, id="the first one: they take the place of activations"),
        pytest.param(Strategy(), 4e6, 1e6, 0, id="one rank sends nothing, and copies nothing"),
        pytest.param(Strategy(dp_size=2), 4e6, 1e6, 4e6, id="several copy all gradients"),
        pytest.param(Strategy(dp_size=2, zero_stage=1, bucket=100), 4e6, 0, 4000 + 800 + 2e6, id="ZeRO-1: its part"),
        pytest.param(
            Strategy(dp_size=2, zero_stage=1), 4e6, 0, 4000 + 4 * (5e8 + 1e6) + 2e6, id="a bucket is allocated whole"
        ),
        pytest.param(
            Strategy(dp_size=2, zero_stage=2, bucket=1e7, overlap_data=True),
            2e6,
            3e6,
            3e6 + 8000 + 8e7,
            id="two, if both",
        ),
        pytest.param(Strategy(zero_stage=3, bucket=1e7), 4e6, 0, 4000 + 4 * (1e7 + 1e6), id="one rank has one too"),
        pytest.param(
            Strategy(dp_size=2, zero_stage=2, bucket=100),
            2e6,
            3e6,
            3e6 + 8000 + 800,
            id="ZeRO-2: a gradient and its copy",
        ),
        pytest.param(Strategy(dp_size=2, zero_stage=2, bucket=100), 2e6, 0, 2e6, id="and the copy that is stepped on"),
        pytest.param(
            Strategy(dp_size=2, zero_stage=2, bucket=100, accumulation=2),
            2e6,
            1e6,
            1e6 + 8000 + 800 + 2e6,
            id="from the second micro-batch on its part is there twice",
        ),
        pytest.param(
            Strategy(dp_size=2, zero_stage=3, bucket=100), 2e6, 1e6, 1e6 + 4e6 + 800 + 4000, id="ZeRO-3: all parameters"
        ),
        pytest.param(
            Strategy(zero_stage=3, bucket=100), 4e6, 0, 4e6, id="but on one rank: the copy that is stepped on"
        ),
    ],
)
def test_a_step_is_fullest_at_one_of_three_moments(
    strategy: Strategy, gradients: float, made: float, bytes_: float
) -> None:
    assert passing(strategy, gradients, made) == bytes_


def test_the_last_layer_of_a_backward_meets_the_gradients_of_all_others() -> None:
    one, more = Strategy(recompute="full"), Strategy(recompute="full", accumulation=2)
    assert passing(one, 4e6, 1e6, layer=9e5) == 9e5 - 300 * 4  # its own come after it
    assert passing(more, 4e6, 1e6, layer=9e6) == 9e6  # but for those of the micro-batch before
    assert passing(Strategy(dp_size=2, zero_stage=2, bucket=0), 0, layer=9e6) < 9e6


def test_zero_3_on_a_cpu_keeps_gradients_where_they_are_until_a_bucket_is_full() -> None:
    small, large = Strategy(dp_size=2, zero_stage=3, bucket=100), Strategy(dp_size=2, zero_stage=3)
    assert (
        passing(small, 2e6, 1e6, on_cpu=True) == 1e6 + 4e6 + 4000 + 100 * 4 * 1.5
    )  # a bucket, and the part of its mean
    assert passing(large, 2e6, 9e6, on_cpu=True) == 9e6 + 4e6 + 4000  # none is full where the backward begins
    assert passing(large, 2e6, 0, on_cpu=True) == 4e6 * 1.5  # at its end all stand
    stay = replace(large, accumulation=2, gathers_once=True)
    assert passing(stay, 2e6, 0, on_cpu=True) == 4e6 * 1.5 + 4e6  # and parameters that the next micro-batch needs


def test_sums_of_16_bit_gradients_are_copied_as_their_dtypes_ask() -> None:
    shared = Strategy(dp_size=2, zero_stage=2, bucket=0)
    moved = 2 * 2 * LARGEST
    assert passing(shared, 2e6, precision="bf16", gradient_bytes=4) == moved  # the flat tensor of sums is stepped on
    assert passing(shared, 1e6, precision="fp16", gradient_bytes=2) == 0.5e6 * (2 + 4)
    flat = Strategy(dp_size=2, zero_stage=1, flat_sums=True)
    assert passing(flat, 4e6, precision="bf16", gradient_bytes=4) == 2e6  # the means of this rank's half
    rounded = replace(flat, sent_bytes=2)
    assert passing(rounded, 4e6, precision="bf16", gradient_bytes=4) == 3e6  # all that is sent, and that half
    assert passing(replace(flat, dp_size=1), 4e6, precision="bf16", gradient_bytes=4) == 2 * LARGEST  # nothing is sent
    assert passing(Strategy(dp_size=2, bucket=7), 4e6, 1e6, habits=HABITS["megatron"]) == 1e6


def test_what_the_host_holds_is_not_stepped_on_here() -> None:
    assert passing(Strategy(dp_size=2, zero_stage=2, bucket=0, offload="optimizer"), 0, 0) == 2 * LARGEST * 4


def test_a_cpu_hands_out_pages_as_they_are_filled() -> None:
    first, second = (Strategy(dp_size=2, zero_stage=2, bucket=0, accumulation=times) for times in (1, 2))
    assert passing(first, 2e6, 5e6, on_cpu=True) == 5e6 + 8000 - 2e6
    assert passing(second, 2e6, 5e6, on_cpu=True) == 5e6 + 8000
    assert passing(replace(second, bucket=100), 2e6, 5e6, on_cpu=True) == 5e6 + 8000  # none is filled yet
    assert passing(replace(first, zero_stage=1, bucket=100), 4e6, 0, on_cpu=True) == 2e6  # its part alone
    assert passing(second, 2e6, 5e6) == 5e6 + 8000 + 2e6


def test_buckets_gathered_parameters_and_sub_groups_have_a_limit() -> None:
    assert passing(Strategy(dp_size=2), 0, held=4 * FLAT_BUCKET) == FLAT_BUCKET * 4
    assert passing(Strategy(dp_size=8, zero_stage=3, bucket=0), 0, held=2 * GATHERED) == GATHERED * 4 + LARGEST * 4
    assert passing(Strategy(zero_stage=3, bucket=0), 0, held=4 * SUB_GROUP) == SUB_GROUP * 4


def test_ranks_of_a_host_read_what_each_of_them_shares() -> None:
    work = Workload(shape=SHAPE, sequence=1, on_cpu=True)
    assert SHARED_PIECE == host_memory.PIECE_BYTES
    assert shared_bytes(work, Strategy(dp_size=4), HELD * 1e3, 0) == 4 * 2 * SHARED_PIECE
    assert shared_bytes(work, Strategy(tp_size=2, dp_size=2), 100, 1000) == 2 * 2 * 200 + 2 * 2 * 1000
    assert shared_bytes(Workload(shape=SHAPE, sequence=1), Strategy(dp_size=4), HELD, 0) == 0


def test_the_parts_add_up_to_the_fullest_moment() -> None:
    work = Workload(shape=SHAPE, sequence=10**4, precision="fp32")
    memory = stage_memory(work, Strategy(), STAGE, 0)
    later = stage_memory(work, Strategy(accumulation=2), STAGE, 0)
    matrix = 4 * LARGEST
    assert stage_memory(replace(work, on_cpu=True), Strategy(), STAGE, 0).buffers == 0  # pages have no gaps
    assert memory.buffers == pytest.approx(0.04 * later.activations)
    assert memory.activations == pytest.approx(later.activations - memory.gradients + matrix)
    assert later.buffers == pytest.approx(memory.buffers + matrix)
