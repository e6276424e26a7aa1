"""Which layouts are tried, why others fall out, and what more devices or memory would bring."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.planner.cli.verbs import estimate_lines, plan_lines
from harness.planner.hardware import GIB, Hardware, load_hardware
from harness.planner.preset import preset
from harness.planner.search import (
    NO_HOST_MEMORY,
    NO_MEMORY,
    Task,
    candidates,
    more_devices,
    more_memory,
    require_fit,
    search,
    task_of,
)
from harness.planner.workload import HABITS, Strategy, layer_parameters
from harness.schedules import SCHEDULES, ModelChunks, PipelineSchedule

TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256}
TINY |= {"intermediate_size": 128, "num_key_value_heads": 4, "tie_word_embeddings": False}
EXPERTS = {**TINY, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 2}
PACKAGED = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-v", "dualpipe-v")
"""The schedules of this package. One that is added may be tried as well."""
H100 = load_hardware("h100")


def task(world_size: int, hardware: Hardware = H100, model: dict[str, Any] = TINY, **options: Any) -> Task:
    return task_of(model, "tiny", hardware, world_size=world_size, sequence=64, **options)


def strategies(asked: Task) -> list[Strategy]:
    return [one for one in candidates(asked) if isinstance(one, Strategy)]


@pytest.mark.thorough
def test_whole_experts_are_recommended_where_gathering_all_of_them_takes_longer() -> None:
    wide = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "vocab_size": 151936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    model = {"model_type": "qwen3_moe", **wide, **heads, **experts}
    best = {
        batch: search(task_of(model, "it", H100, world_size=16, sequence=4096, global_batch=batch)).fitting[0].strategy
        for batch in (16, 512)
    }
    assert best[16].ep_size > best[16].tp_size  # one sample a rank: too little to hide the gathering behind
    assert best[512].zero_stage == 3


@given(st.integers(1, 24), st.integers(1, 60))
def test_every_layout_has_all_ranks_and_the_whole_batch(world_size: int, batch: int) -> None:
    found = strategies(task(world_size, global_batch=batch))
    assert all((one.world_size, one.global_batch) == (world_size, batch) for one in found)
    assert len(set(found)) == len(found)
    for one in found:
        assert one.zero_stage >= 1 and (one.pp_size == 1 or one.zero_stage == 1)  # bf16
        assert one.micro_batch <= 64
        assert one.schedule == "1f1b" or one.pp_size > 1
        assert one.recompute == "none" or one.schedule == "1f1b" or one.schedule not in PACKAGED


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        pytest.param(task(8), "more pipeline stages than decoder layers", id="stages"),
        pytest.param(task(5), "tensor-parallel ranks do not fit 4 attention heads", id="heads"),
        pytest.param(
            task(2, global_batch=3), "a global batch of 3 is not a multiple of the data-parallel ranks", id="batch"
        ),
        pytest.param(replace(task(2), no_tensor="it has no plan"), "it has no plan", id="plan"),
    ],
)
def test_what_cannot_run_falls_out_with_its_reason(asked: Task, reason: str) -> None:
    assert reason in list(candidates(asked))
    found = search(asked)
    assert found.reasons[reason] > 0
    assert found.tried == len(list(candidates(asked)))


OFFLOADED = [(2, "optimizer"), (3, "optimizer"), (3, "optimizer+parameters")]


@pytest.mark.parametrize(
    ("name", "precision", "world_size", "stages"),
    [
        pytest.param("h100", "bf16", 1, {(1, "none"), *OFFLOADED}, id="one rank shares with its host alone"),
        pytest.param("h100", "fp32", 1, {(0, "none"), *OFFLOADED}, id="in fp32 too"),
        pytest.param(
            "cpu", "fp32", 2, {(0, "none"), (1, "none"), (2, "none"), (3, "none")}, id="no host beside a host"
        ),
    ],
)
def test_zero_is_tried_where_it_shares_something(name: str, precision: str, world_size: int, stages: set[Any]) -> None:
    asked = task(world_size, load_hardware(name), precision=precision)
    data_only = [one for one in strategies(asked) if one.pp_size == one.tp_size == 1]
    assert {(one.zero_stage, one.offload) for one in data_only} == stages


@pytest.mark.parametrize(
    ("world_size", "length", "orders", "shared"),
    [
        pytest.param(2, 64, {("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble-v", 2)}, {2}, id="all"),
        pytest.param(4, 62, {("1f1b", 1), ("zero-bubble", 1)}, {2}, id="four layers make no eight parts"),
        pytest.param(
            2, 63, {("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble-v", 2)}, set(), id="odd"
        ),
    ],
)
def test_schedules_and_shared_sequences_are_tried_where_they_can_run(
    world_size: int, length: int, orders: set[tuple[str, int]], shared: set[int]
) -> None:
    asked = task(world_size)
    found = strategies(replace(asked, workload=replace(asked.workload, sequence=length)))
    tried = {(one.schedule_name, one.chunks_per_stage) for one in found if one.pp_size == world_size}
    assert {each for each in tried if each[0] in PACKAGED} == orders
    assert {one.tp_size for one in found if one.sequence_parallel} == shared
    assert {(one.schedule_name, one.chunks_per_stage) for one in found if one.pp_size == 1} == {("1f1b", 1)}


@pytest.mark.parametrize(
    ("record", "waits", "tried", "with_recomputation"),
    [
        pytest.param({}, 1, {1}, True, id="shorter waits"),
        pytest.param({}, 3, set(), False, id="as long as 1F1B, with as many activations"),
        pytest.param({"defers": True}, 3, {1}, False, id="weight gradients are deferred"),
        pytest.param({"chunks": None}, 9, {2}, True, id="any number of chunks"),
        pytest.param({"chunks": 3}, 9, {3}, True, id="three chunks"),
        pytest.param({"chunks": 4}, 9, set(), False, id="more chunks than layers"),
        pytest.param({"chunks": 2, "folded": True}, 9, {2}, True, id="folded"),
        pytest.param({"predicted_as": "zero-bubble"}, 1, set(), False, id="another stands for it"),
    ],
)
def test_a_schedule_is_tried_as_its_record_says(
    record: dict[str, Any], waits: int, tried: set[int], with_recomputation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = SCHEDULES["1f1b"]
    seen = set()

    def in_flight(chunks: ModelChunks, micro_batches: int, stage: int) -> float:
        seen.add(chunks)
        return usual.in_flight(chunks, micro_batches, stage)

    new = PipelineSchedule(
        **{"chunks": 1} | record, name="new", paper="", order=usual.order, waits=lambda *_: waits, in_flight=in_flight
    )
    monkeypatch.setitem(SCHEDULES, "new", new)  # type: ignore[arg-type]  # a dict
    asked = task(2, model={**TINY, "num_hidden_layers": 7}, global_batch=16)
    found = search(asked)
    ours = [one for one in (*found.fitting, *found.too_large) if one.strategy.schedule_name == "new"]
    assert {one.strategy.chunks_per_stage for one in ours} == tried
    assert {one.strategy.pp_size for one in ours} == ({2} if tried else set())
    assert any(one.strategy.recompute == "full" for one in ours) == with_recomputation
    if not tried:
        return
    assert ModelChunks(2, *tried, folded=new.folded) in seen
    pipeline = preset(ours[0].strategy, "bf16")["pipeline"]
    assert pipeline["schedule"] == "new" and pipeline.get("chunks_per_stage") == (None if new.chunks else 2)
    if waits == 1:
        best = next(one for one in found.fitting if one.strategy.pp_size == 2)
        assert best.strategy.schedule_name == "new"


def test_experts_are_spread_over_no_more_ranks_than_there_are() -> None:
    asked = task(4, model=EXPERTS)
    assert asked.spreads_experts
    assert {(one.tp_size, one.ep_size) for one in strategies(asked)} == {(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)}
    assert {one.zero_stage for one in strategies(asked) if one.ep_size > one.tp_size} <= {0, 1, 2}
    assert {one.ep_size for one in strategies(task(4))} == {1}
    assert {one.ep_size for one in strategies(asked) if one.sequence_parallel} == {1}


@pytest.mark.parametrize(
    ("options", "batch", "precision", "gradient"),
    [
        pytest.param({}, 8 * 3, "bf16", 4, id="eight samples a rank, the faster precision"),
        pytest.param({"global_batch": 5, "precision": "fp16"}, 5, "fp16", 2, id="fp16 sums in fp16"),
        pytest.param({"precision": "fp32"}, 24, "fp32", 4, id="fp32"),
    ],
)
def test_what_a_task_leaves_open_is_filled_in(
    options: dict[str, Any], batch: int, precision: str, gradient: int
) -> None:
    asked = task(3, **options)
    assert (asked.global_batch, asked.workload.precision, asked.workload.gradient_bytes) == (batch, precision, gradient)


def test_bf16_is_the_default_only_where_it_is_faster() -> None:
    slow = replace(H100, flops={"fp32": 2.0, "bf16": 2.0}, matmul_efficiency={"fp32": 1.0, "bf16": 0.9})
    assert task(1, slow).workload.precision == "fp32"


def test_a_precision_that_a_device_lacks_is_told() -> None:
    old = replace(H100, flops={"fp32": 1e13, "bf16": 1e13})
    with pytest.raises(UserError, match=r"^NVIDIA H100 SXM 80GB has no fp16: use one of fp32, bf16, or add its tflops"):
        search(task(1, old, precision="fp16"))


def small(gib: float, host_gib: float = 1000) -> Hardware:
    return replace(H100, memory_bytes=gib * GIB, context_bytes=0, host_memory_bytes=host_gib * GIB)


def test_a_layout_that_fits_nowhere_is_told_with_what_is_missing() -> None:
    asked = task(1, small(1e-4))
    assert set(search(asked).reasons) == {NO_MEMORY}
    with pytest.raises(
        UserError, match=r"^no layout of 1 rank fits: the smallest needs .* GiB on each device, which has 0"
    ):
        require_fit(asked, search(asked))


def test_a_layout_that_the_host_alone_cannot_hold_is_told_with_the_host_s_memory() -> None:
    asked = task(2, small(0.1, 1e-6))
    found = search(asked)
    assert found.reasons[NO_HOST_MEMORY] > 0
    offloaded = replace(found, fitting=[], too_large=[one for one in found.too_large if one.host_bytes])
    with pytest.raises(UserError, match=r"GiB of the host for each device, which has 0\.0"):
        require_fit(asked, offloaded)


def test_a_number_of_ranks_that_cannot_run_at_all_is_told_with_the_commonest_reason() -> None:
    asked = task(7, global_batch=1)
    with pytest.raises(
        UserError, match=r"^no layout of 7 ranks can run: (more pipeline stages|tensor-parallel|a global)"
    ):
        require_fit(asked, search(asked))


def test_the_fastest_comes_first_and_of_equals_the_smallest() -> None:
    fitting = search(task(4, global_batch=8)).fitting
    keys = [(-one.tokens_per_second, one.peak_bytes) for one in fitting]
    assert keys == sorted(keys) and len(keys) > 20


def test_a_plan_like_another_program_has_its_layouts_and_its_habits() -> None:
    asked = task(4, global_batch=8, habits=HABITS["megatron"])
    for one in strategies(asked):
        assert one.zero_stage == 1 and not one.flat_sums and one.overlap_data
        assert one.sequence_parallel == (one.tp_size > 1) and one.offload == "none"
    sharded = strategies(task(4, global_batch=8, habits=HABITS["torchtitan"]))
    assert {one.zero_stage for one in sharded if one.pp_size == 1} == {3}
    assert {one.zero_stage for one in sharded if one.pp_size > 1} == {1}  # gathered once, not for each micro-batch


def test_what_is_recommended_leaves_room_for_what_the_prediction_lacks() -> None:
    plenty = search(task(2))
    peak = plenty.fitting[0].peak_bytes / GIB
    for share, has_room in ((1.05, False), (1.0 / 0.92 + 1e-6, True)):
        close = search(task(2, small(peak * share)))
        assert any(one.strategy == plenty.fitting[0].strategy for one in close.fitting) == has_room
        assert all(one.peak_bytes <= 0.92 * one.hardware.limit_bytes for one in close.fitting)
    one = replace(plenty.fitting[0], hardware=small(peak * 1.05))
    assert one.fits and not one.has_room
    assert "fits closely" in "\n".join(estimate_lines(one))


def test_more_memory_is_the_least_that_a_faster_layout_needs() -> None:
    plenty = search(task(2))
    assert more_memory(plenty) is None
    asked = task(2, small(plenty.fitting[0].peak_bytes / GIB * 0.999))
    found = search(asked)
    more = more_memory(found)
    assert more is not None
    assert more.tokens_per_second > found.fitting[0].tokens_per_second
    enough = search(replace(asked, hardware=small(asked.hardware.limit_bytes / GIB + more.gib * (1 + 1e-9))))
    assert enough.fitting[0].tokens_per_second == pytest.approx(more.tokens_per_second)


def test_more_devices_are_the_next_that_are_faster() -> None:
    asked = task(2, global_batch=12)
    best = search(asked).fitting[0]
    more = more_devices(asked, best)
    assert more is not None and more.devices in (3, 4)
    assert more.tokens_per_second > best.tokens_per_second
    prime = task(1, global_batch=1, model={**TINY, "num_hidden_layers": 1, "num_attention_heads": 1})
    assert more_devices(replace(prime, no_tensor="none"), search(prime).fitting[0]) is None


def test_the_lines_say_what_is_left_out_and_what_nothing_would_bring() -> None:
    found = search(task(2, global_batch=4))
    lines = list(plan_lines(found, 1, None, None))
    assert f"and {len(found.fitting) - 1} slower layouts: --top shows more" in lines
    assert "more devices: none of the next sizes is faster with this global batch" in lines
    assert "more memory: no faster layout needs it" in lines
    every = list(plan_lines(replace(found, reasons=Counter()), len(found.fitting), None, None))
    assert not any("--top" in line for line in every)
    table = every[: len(found.fitting) + 1]
    assert len({len(line) for line in table}) == 1  # columns stand below each other
    assert [line.split()[0] for line in table[1:3]] == ["1", "2"]


def test_an_estimate_that_does_not_fit_says_so_and_what_the_host_holds() -> None:
    found = search(task(2))
    plain = next(one for one in found.fitting if one.strategy.offload == "none")
    off = next(one for one in found.fitting if one.strategy.offload == "optimizer")
    assert not any("does not fit" in line or "of the host" in line for line in estimate_lines(plain))
    assert any(
        line.startswith("and ") and "GiB of the host's memory for each rank" in line for line in estimate_lines(off)
    )
    *_, last = estimate_lines(replace(off, hardware=small(1e-6, 1e-6)))
    assert last.startswith("does not fit: a rank needs 0.") and last.endswith("of 0.0 on its host")
    assert not replace(off, hardware=small(1000, 1e-6)).fits


def test_other_programs_have_their_own_chunks_experts_and_stages() -> None:
    """Megatron-LM: --num-layers-per-virtual-pipeline-stage, --expert-model-parallel-size over data-parallel ranks."""
    deep = {**EXPERTS, "num_hidden_layers": 12, "num_local_experts": 8}
    ours, theirs = (
        strategies(task(8, model=deep, global_batch=16, **like)) for like in ({}, {"habits": HABITS["megatron"]})
    )
    of_two = [one for one in theirs if (one.pp_size, one.tp_size) == (2, 1)]
    # 12 layers, or 14 with embedding and head, on two stages
    assert {one.chunks for one in of_two} == {1, 2, 3, 6, 7} and {one.chunks for one in ours} == {1, 2}
    assert {one.ep_size for one in of_two} == {1, 2, 4}
    shared = [one for one in theirs if (one.pp_size, one.tp_size, one.ep_size) == (1, 2, 4)]
    assert shared and all(one.sequence_parallel for one in shared)  # with experts, too
    assert {one.partition for one in theirs} == {"type:DecoderLayer"} != {one.partition for one in ours}
    asked = task(8, global_batch=16, habits=HABITS["torchtitan"])
    assert all(one.bucket == layer_parameters(one, asked.workload.shape.layers[0]) for one in strategies(asked))
