"""Memory and seconds of a layout, against numbers that can be worked out by hand."""

from dataclasses import replace

import pytest

from harness.config.values.batch import bubble
from harness.planner import memory
from harness.planner.estimate import Estimate, estimate
from harness.planner.hardware import Link, load_hardware, names
from harness.planner.layer_time import expert_traffic
from harness.planner.memory import COMMUNICATOR, local_parameters
from harness.planner.model_config import decoder_of, read_decoder
from harness.planner.shape import DecoderShape, LayerShape
from harness.planner.step import CONTENTION, step_seconds, strategy_stages
from harness.planner.traffic import Group, all_reduce, data_group, expert_exchange, half_ring
from harness.planner.workload import HABITS, Habits, Strategy, Workload

H100 = load_hardware("h100")
SHAPE = read_decoder("llama-1b")
WORKLOAD = Workload(shape=SHAPE, sequence=2048)
# layers alone, so that stages are equal: nothing looks up, nothing is predicted, and the last norm is one of 65
EVEN_CONFIG = {"hidden_size": 1024, "num_hidden_layers": 32, "num_attention_heads": 8, "vocab_size": 8}
EVEN = decoder_of(EVEN_CONFIG, "even")
WIDTHS = dict(hidden=256, heads=4, kv_heads=4, query=256, key=256, value=256, output=256)


def of(strategy: Strategy, workload: Workload = WORKLOAD) -> Estimate:
    return estimate(H100, workload, strategy)


@pytest.mark.parametrize(("micro_batches", "share"), [(1, 1 / 2), (2, 1 / 3), (6, 1 / 7)])
def test_two_equal_stages_idle_by_the_formula(micro_batches, share):
    one = of(Strategy(pp_size=2, accumulation=micro_batches), replace(WORKLOAD, shape=EVEN)).seconds
    assert bubble(2, micro_batches) == pytest.approx(share)
    assert one.idle == pytest.approx(share, rel=0.02)  # the two ends differ a little
    assert one.bubble / (one.bubble + one.compute) == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 2), ("zero-bubble-v", 1)])
def test_each_part_of_a_stage_sends_every_micro_batch(schedule, virtual):
    one = Strategy(pp_size=4, accumulation=8)
    seconds = [of(x).seconds.pipeline for x in (one, replace(one, schedule=schedule, chunks=virtual))]
    assert seconds[1] / seconds[0] == pytest.approx((2 * 8 + 3) / (8 + 3))


def test_stages_that_send_while_they_compute_wait_where_the_pipeline_fills_and_empties():
    one = Strategy(pp_size=4, accumulation=8, chunks=2)
    hidden = replace(WORKLOAD, habits=Habits(overlap_interleaved=True))
    seconds = [of(one, work).seconds.pipeline for work in (WORKLOAD, hidden)]
    assert seconds[1] / seconds[0] == pytest.approx((CONTENTION * 2 * 8 + 3) / (2 * 8 + 3))


def test_tokens_travel_to_the_ranks_of_their_experts_where_the_program_sends_them():
    layer = LayerShape(**WIDTHS, experts=8, top_k=2, expert_ffn=256)
    work = Workload(shape=DecoderShape(layers=(layer,), vocab=8), sequence=1024)
    sent, apart = replace(work, habits=Habits(tokens_travel=True)), Strategy(dp_size=8, ep_size=8)
    traffic = 2 * expert_traffic(H100, sent, apart, layer)
    assert step_seconds(H100, sent, apart).tensor == pytest.approx(traffic) and traffic > 0
    between = expert_exchange(H100, 8, 1, 1024 * layer.hidden * 2, 2)  # within a node all programs send as much
    assert step_seconds(H100, work, apart).tensor == pytest.approx(2 * 2 * between)
    assert (
        step_seconds(H100, work, Strategy(tp_size=8, ep_size=8)).tensor
        == step_seconds(H100, work, Strategy(tp_size=8)).tensor
    )


def test_a_ring_moves_each_byte_through_each_rank_almost_twice():
    group = Group(size=8, bytes_per_second=1e9)
    assert all_reduce(group, 1e9) == pytest.approx(2 * 7 / 8)
    assert half_ring(replace(group, size=1), 1e9) == 0


def test_the_parts_of_a_step_add_up():
    row = of(Strategy(pp_size=2, tp_size=2, dp_size=2, micro_batch=2, accumulation=4)).row()
    parts = dict(row["step_seconds"])
    assert parts.pop("total") == pytest.approx(sum(parts.values()))
    assert row["tokens_per_second"] == pytest.approx(2 * 4 * 2 * 2048 / row["step_seconds"]["total"])
    for stage in row["memory_gib"]["stages"]:
        assert stage.pop("total") == pytest.approx(sum(stage.values()))


@pytest.mark.parametrize(
    ("precision", "stage", "each"),
    [
        ("fp32", 0, 4 + 4 + 8),
        ("fp32", 1, 4 + 4 + 12 / 4),
        ("bf16", 1, 2 + 2 + 4 + 12 / 4),
        ("bf16", 2, 2 + 4 / 4 + 12 / 4),
        ("bf16", 3, (2 + 4 + 12) / 4),
    ],
)
def test_model_states_are_shared_out_as_deepspeed_does(precision, stage, each):
    one = of(Strategy(dp_size=4, zero_stage=stage), replace(WORKLOAD, precision=precision)).stages[0]
    assert one.parameters + one.gradients + one.optimizer == pytest.approx(each * SHAPE.parameters)


@pytest.mark.parametrize(
    ("precision", "flat", "gradient_bytes", "each"),
    [
        ("fp32", True, 4, 4 + 4 + 8 / 4),  # float32 weights are updated where they lie
        ("bf16", True, 4, 2 + 4 + 12 / 4),  # a gradient is freed when it is added to its sum
        ("bf16", False, 2, 2 + 2 + 12 / 4),  # sums in bf16 are DeepSpeed's, and no second tensor
    ],
)
def test_states_of_zero_1_depend_on_how_gradients_are_summed(precision, flat, gradient_bytes, each):
    work = replace(WORKLOAD, precision=precision, gradient_bytes=gradient_bytes)
    one = of(Strategy(dp_size=4, zero_stage=1, flat_sums=flat), work).stages[0]
    assert one.parameters + one.gradients + one.optimizer == pytest.approx(each * SHAPE.parameters)


@pytest.mark.parametrize(
    ("strategy", "on_cpu", "groups"),
    [
        (Strategy(dp_size=4, zero_stage=1, flat_sums=True), False, 1),
        (Strategy(dp_size=4, ep_size=2, zero_stage=1, flat_sums=True), False, 2),  # experts have other data ranks
        (Strategy(dp_size=4, ep_size=4, zero_stage=1, flat_sums=True), False, 1),
        (Strategy(dp_size=4, zero_stage=1, flat_sums=True), True, 0),  # gloo has none
        (Strategy(dp_size=4, zero_stage=2), False, 0),
        (Strategy(tp_size=4, zero_stage=1, flat_sums=True), False, 0),
    ],
)
def test_on_gpus_weights_travel_in_communicators_of_their_own(strategy, on_cpu, groups, monkeypatch):
    workload = replace(WORKLOAD, on_cpu=on_cpu)
    counted = of(strategy, workload).peak_bytes
    monkeypatch.setattr(memory, "COMMUNICATOR", 0)
    assert counted - of(strategy, workload).peak_bytes == pytest.approx(groups * COMMUNICATOR)


@pytest.mark.parametrize(("expert", "copies"), [(1, 8), (4, 2), (8, 1)])
def test_states_are_shared_out_among_the_ranks_that_hold_copies_of_an_expert(expert, copies):
    layer = LayerShape(
        hidden=64, heads=4, kv_heads=4, query=64, key=64, value=64, output=64, experts=8, top_k=2, expert_ffn=4096
    )
    shape = DecoderShape(layers=(layer,), vocab=64)
    strategy = Strategy(dp_size=8, ep_size=expert, zero_stage=1)
    one = of(strategy, Workload(shape=shape, sequence=16)).stages[0]
    dense = shape.parameters - layer.expert_parameters
    assert one.optimizer == pytest.approx(12 * (dense / 8 + layer.expert_parameters / expert / copies))


def test_stages_hold_the_whole_model_and_a_tied_table_twice():
    strategy = Strategy(pp_size=4)
    held = sum(local_parameters(WORKLOAD, strategy, stage) for stage in strategy_stages(WORKLOAD, strategy))
    assert held == SHAPE.parameters + SHAPE.vocab * SHAPE.hidden


def test_the_first_stage_keeps_most_activations():
    stages = of(Strategy(pp_size=4, accumulation=8), replace(WORKLOAD, shape=EVEN)).stages
    kept = [stage.activations for stage in stages]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] / kept[-1] == pytest.approx(4)


@pytest.mark.parametrize(("dp", "tp", "gib"), [(2, 4, 25.2), (4, 2, 42.63), (1, 8, 16.5)])
def test_published_peaks_of_sequence_parallel_runs_are_met(dp, tp, gib):
    """All ranks need the same here: nanotron, Llama 3.2 1B, sequences of 4,096 in micro-batches of 8 on 8 H100."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    shape = decoder_of(sizes | {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True}, "1b")
    work = Workload(shape=shape, sequence=4096)
    layout = Strategy(dp_size=dp, tp_size=tp, micro_batch=8, zero_stage=1, flat_sums=True, sequence_parallel=True)
    assert of(layout, work).peak_bytes / 2**30 == pytest.approx(gib, rel=0.1)


def test_on_a_crowded_host_other_ranks_use_the_time_of_those_that_wait():
    cpu, work = load_hardware("cpu"), Workload(shape=EVEN, sequence=128, precision="fp32")
    crowded = replace(cpu, crowding=4.0)
    four = Strategy(pp_size=4)  # one micro-batch: with a core each, three of four ranks wait at any time
    assert estimate(cpu, work, four).seconds.idle == pytest.approx(3 / 4, rel=0.02)
    assert estimate(crowded, work, four).seconds.idle == pytest.approx(0, abs=0.01)
    alone = Strategy(micro_batch=4)
    assert estimate(crowded, work, alone).seconds == estimate(cpu, work, alone).seconds


def test_the_loss_holds_the_logits_once():
    workload = replace(WORKLOAD, precision="fp32", gradient_bytes=4)
    logits = 8 * 2048 * SHAPE.vocab * 4
    strategy = Strategy(micro_batch=8, accumulation=2)  # in the first backward gradients take their place
    assert logits < of(strategy, workload).stages[0].logits < 1.02 * logits


def test_checkpointing_trades_memory_for_time():
    plain, again = of(Strategy(micro_batch=4)), of(Strategy(micro_batch=4, recompute="full"))
    assert again.stages[0].activations < plain.stages[0].activations / 3
    assert 1.2 < again.seconds.compute / plain.seconds.compute < 1.4


def test_sequence_parallelism_stores_less_of_a_layer_and_holds_the_same_parameters():
    untied = replace(WORKLOAD, shape=replace(SHAPE, tied=False))
    whole, shared = (
        of(Strategy(tp_size=4, sequence_parallel=on), untied).row()["memory_gib"]["stages"][0] for on in (False, True)
    )
    assert shared["parameters"] == whole["parameters"] and shared["activations"] < whole["activations"]


def test_parameters_that_stay_gathered_travel_once_a_step():
    # a narrow link, which nothing hides: gradients go by for each micro-batch, parameters for each pass, or once
    few = replace(WORKLOAD, shape=decoder_of({**EVEN_CONFIG, "num_hidden_layers": 2}, "few"), gradient_bytes=2)
    narrow = replace(H100, node=replace(H100.node, bytes_per_second=1e3))
    each = Strategy(dp_size=2, zero_stage=3, accumulation=4)
    slow, fast = (estimate(narrow, few, replace(each, gathers_once=once)).seconds.data for once in (False, True))
    ends = 3 / 2  # of the first and the last of two layers: two gathers and a reduction
    assert fast / slow == pytest.approx((1 + 4 + ends) / (4 * 2 + 4 + ends), rel=1e-3)
    large = replace(few, shape=decoder_of({**EVEN_CONFIG, "hidden_size": 8192, "num_hidden_layers": 2}, "large"))
    once, twice = (estimate(narrow, large, replace(each, recompute=how)).seconds.data for how in ("none", "full"))
    assert twice / once == pytest.approx((4 * 3 + 4 + ends) / (4 * 2 + 4 + ends), rel=1e-3)


def test_only_computation_of_fsdp_hides_reductions_of_zero_3():
    work, each = replace(WORKLOAD, shape=EVEN), Strategy(dp_size=8, zero_stage=3, micro_batch=8)
    shown, hidden = (
        step_seconds(H100, replace(work, habits=Habits(overlap_data=on)), each).data for on in (False, True)
    )
    layers, held = len(EVEN.layers), local_parameters(work, each, strategy_stages(work, each)[0])
    reductions = layers * half_ring(data_group(H100, each), held * work.element_bytes / layers)
    assert shown - hidden == pytest.approx((1 - CONTENTION) * reductions, rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "copies"),
    [(0, 1 + 1), (1, 1 + 1 / 4), (2, 3 * (2 + 1 / 4)), (3, 0)],
    ids=["there and back", "back to a part", "for every micro-batch, by way of a bucket", "where they lie"],
)
def test_the_processor_of_a_host_copies_gradients_to_send_them(stage, copies):
    at_once = Link(bytes_per_second=1e30, hop_seconds=0.0)
    host = replace(H100, compute_units=1, node=at_once, network=at_once)
    strategy = Strategy(dp_size=4, accumulation=3, zero_stage=stage)
    gradients = local_parameters(WORKLOAD, strategy, strategy_stages(WORKLOAD, strategy)[0]) * WORKLOAD.gradient_bytes
    width = 1.0 if stage < 2 else WORKLOAD.element_bytes / WORKLOAD.gradient_bytes
    moved = estimate(host, WORKLOAD, strategy).seconds.data * host.memory_bytes_per_second
    assert moved == pytest.approx(2 * copies * width * gradients, rel=1e-6, abs=1e6)
    gpu = replace(host, compute_units=2)
    # a GPU shows the copies of each micro-batch alone, of DeepSpeed, and what hidden copies of gathered parameters slow
    # down; collectives start
    copied = {2: 3 * (2 + 1 / 4), 3: 3 * (2 + 1 / 4) + CONTENTION * 3 * 2}.get(stage, 0.0)
    seen = 2 * copied * width * gradients / gpu.memory_bytes_per_second
    assert estimate(gpu, WORKLOAD, strategy).seconds.data == pytest.approx(seen, abs=2e-3)
    fsdp = estimate(gpu, replace(WORKLOAD, habits=HABITS["torchtitan"]), strategy).seconds.data
    assert fsdp == pytest.approx(0.0, abs=2e-3)


def test_offloading_moves_states_to_the_host():
    plain, off = of(Strategy(dp_size=8, zero_stage=3)), of(Strategy(dp_size=8, zero_stage=3, offload="optimizer"))
    assert off.stages[0].optimizer == 0 < plain.stages[0].optimizer
    assert off.stages[0].host >= plain.stages[0].optimizer
    assert off.seconds.optimizer > plain.seconds.optimizer


@pytest.mark.parametrize("name", names())
def test_every_packaged_device_makes_a_plausible_prediction(name):
    hardware = load_hardware(name)
    one = estimate(hardware, WORKLOAD, Strategy(dp_size=2, zero_stage=1, micro_batch=2, accumulation=4))
    assert 0.1 < one.row()["mfu"] < 0.9
