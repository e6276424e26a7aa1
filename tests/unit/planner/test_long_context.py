"""Length as an axis of the planner: a published ladder, how far ours reaches, and a plan for a million tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.planner.cli.verbs import plan_lines
from harness.planner.estimate import estimate
from harness.planner.hardware import load_hardware
from harness.planner.model_config import text_decoder
from harness.planner.search import QUERIES, TILE, longest, search, task_of
from harness.planner.workload import DEEPSPEED, HABITS, Habits, Strategy, Workload

LLAMA_8B = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=False,
)
# Bekman et al. 2025, Arctic Long Sequence Training, arXiv 2506.13996: Llama-8B in bf16 with ZeRO-3, optimizer states in
# host memory (on one GPU the parameters too) and recomputed activations; the largest length, in thousands of tokens.
LOSS, HOST, BLOCKS = {"loss_tile": TILE}, {"host_activations": True}, {"block_tile": TILE}
PUBLISHED = [
    ("h200", 1, 65, {}),
    ("h200", 1, 300, LOSS),
    ("h200", 1, 650, LOSS | HOST),
    ("h200", 1, 1200, LOSS | HOST | BLOCKS),
    ("h100", 8, 32, {}),
    ("h100", 8, 160, LOSS),
    ("h100", 8, 1100, LOSS | {"cp_size": 8}),
    ("h100", 8, 2400, LOSS | {"cp_size": 8} | HOST),
    ("h100", 8, 3800, LOSS | {"cp_size": 8} | HOST | BLOCKS),
]
TOLERANCE = 0.15


def largest(device: str, ranks: int, habits: Habits, **changes: object) -> int:
    """The largest length in thousands of tokens, on a host that these ranks have for themselves."""
    hardware = load_hardware(device, ranks)
    offload = "optimizer" if ranks > 1 else "optimizer+parameters"
    shape = text_decoder(LLAMA_8B, "llama-8b")
    workload = Workload(shape=shape, sequence=4096, gradient_bytes=2, habits=habits)
    base = Strategy(dp_size=ranks, zero_stage=3, recompute="full", offload=offload, overlap_data=True, bucket=2e8)
    found = estimate(hardware, workload, replace(base, **changes))
    return longest(found, hardware.limit_bytes) // 1000


@pytest.mark.parametrize(("device", "ranks", "thousands", "changes"), PUBLISHED, ids=str)
def test_a_published_ladder_is_predicted_and_reached(
    device: str, ranks: int, thousands: int, changes: dict[str, object]
) -> None:
    predicted = largest(device, ranks, HABITS["huggingface"], **changes)
    assert abs(predicted / thousands - 1) <= TOLERANCE, predicted
    last = len(changes) == len(max((row[3] for row in PUBLISHED if row[0] == device), key=len))
    assert not last or largest(device, ranks, DEEPSPEED, **changes) > thousands


@pytest.mark.parametrize(
    ("device", "ranks", "length"), [("h100", 8, 2**20), ("h100", 8, 3_891_200), ("h200", 1, 1_228_800)]
)
def test_millions_of_tokens_find_their_layout(device: str, ranks: int, length: int) -> None:
    hardware = load_hardware(device, ranks)
    task = task_of(LLAMA_8B, "llama-8b", hardware, world_size=ranks, sequence=length, global_batch=1)
    found = search(task)
    assert found.fitting
    best = found.fitting[0]
    assert best.strategy.cp_size * best.strategy.tp_size > 1 or ranks == 1
    assert best.strategy.loss_tile == TILE
    assert longest(best) >= length // 1024 * 1024
    assert best.strategy.global_batch == 1
    said = "\n".join(plan_lines(found, 1, None, None))
    gib = f"{length**2 / 2**30:,.1f} GiB"
    assert f"--packing needs a tokens x tokens mask ({gib} a rank), which does not fit: set tiling" in said


@pytest.mark.parametrize(("length", "fits"), [(131_072, True), (262_144, False)])
def test_a_mask_that_a_layout_has_room_for_is_not_said_to_be_too_large(length: int, fits: bool) -> None:
    config = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096, "num_hidden_layers": 4}
    found = search(task_of(config, "mistral", load_hardware("h100", 8), world_size=8, sequence=length, global_batch=8))
    said = "\n".join(plan_lines(found, 1, None, None))
    assert ("does not fit" in said) != fits
    assert ("mask" in said.splitlines()[1]) != fits, "the row says that masks are made by rows"


def test_short_samples_are_not_shared() -> None:
    task = task_of(LLAMA_8B, "llama-8b", load_hardware("h100", 8), world_size=8, sequence=4096, global_batch=64)
    assert {one.strategy.cp_size for one in search(task).fitting} == {1}


def test_a_window_takes_a_mask_unless_it_is_made_by_rows() -> None:
    config = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}
    hardware = load_hardware("h100", 1)
    workload = Workload(shape=text_decoder(config, "mistral"), sequence=131_072)
    whole, rows = (
        estimate(hardware, workload, Strategy(attention_tile=tile)).stages[0].buffers for tile in (0, QUERIES)
    )
    assert whole - rows == pytest.approx(131_072 * (131_072 - QUERIES))


def test_context_ranks_exchange_what_they_do_not_keep() -> None:
    hardware = load_hardware("h100", 8)
    workload = Workload(shape=text_decoder(LLAMA_8B, "llama-8b"), sequence=131_072)
    alone, shared = (
        estimate(hardware, workload, Strategy(dp_size=8, cp_size=size, zero_stage=3, recompute="full"))
        for size in (1, 8)
    )
    assert alone.seconds.tensor == 0.0 < shared.seconds.tensor
    assert shared.seconds.compute < alone.seconds.compute / 6, "each computes an eighth"
    assert shared.strategy.global_batch * 8 == alone.strategy.global_batch
