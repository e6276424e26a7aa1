"""Bytes of a stage: published formulas, the schedules that run, and what DeepSpeed allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.parallel.pipeline.instructions import most_in_flight
from harness.planner.lora import Lora, targets_of
from harness.planner.memory import (
    LOSS_CHUNK,
    in_flight,
    layer_activations,
    local_parameters,
    stage_activations,
    stage_memory,
)
from harness.planner.model_config import decoder_of
from harness.planner.shape import DecoderShape
from harness.planner.workload import Habits, Stage, Strategy, Workload, layer_parameters, stages_of
from harness.schedules import Kind, ModelChunks
from harness.schedules.interleaved import interleaved
from harness.schedules.one_forward_one_backward import one_forward_one_backward
from harness.schedules.zero_bubble import zero_bubble_h1
from harness.schedules.zero_bubble_v import zero_bubble_v

FUSED = Habits(fused_elementwise=True, gathers_again=True)
MOE = {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
MOE |= {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "num_key_value_heads": 2}


def gpt(hidden: int, heads: int, layers: int = 4) -> DecoderShape:
    """GPT as Megatron-LM trains it."""
    sizes = {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": 8}
    return decoder_of(sizes, "gpt")


def megatron(shape: DecoderShape, sequence: int = 2048) -> Workload:
    """Fused norms and activations."""
    return Workload(shape=shape, sequence=sequence, habits=FUSED)


# Korthikanti et al. 2022, table 2, in bytes over s b h, with selective recomputation: scores are not kept. Its two
# dropout masks, of 1 each, are not here; the output of attention is kept twice by a kernel such as FlashAttention.
@pytest.mark.parametrize(
    ("hidden", "heads"), [pytest.param(12288, 96, id="GPT-3 175B"), pytest.param(20480, 128, id="MT-NLG 530B")]
)
@pytest.mark.parametrize(
    ("sequence_parallel", "outside"),
    [pytest.param(False, 8, id="tensor parallel"), pytest.param(True, 8 / 8, id="tensor and sequence parallel")],
)
def test_a_layer_keeps_what_the_paper_counts(hidden: int, heads: int, sequence_parallel: bool, outside: float) -> None:
    shape = gpt(hidden, heads)
    strategy = Strategy(tp_size=8, micro_batch=3, sequence_parallel=sequence_parallel)
    kept = layer_activations(megatron(shape), strategy, shape.layers[0])
    assert kept / (2048 * 3 * hidden) == pytest.approx(outside + 26 / 8)


def test_recomputed_layers_keep_their_input_and_one_layer_in_whole() -> None:
    shape, strategy = gpt(1024, 8), Strategy(micro_batch=2, recompute="full")
    work = megatron(shape)
    (stage,) = stages_of(shape, 1, "balanced", 2048, checkpointed=True)
    whole = layer_activations(work, replace(strategy, recompute="none"), shape.layers[0])
    assert stage_activations(work, strategy, stage, 0) == 4 * 2 * 2048 * 2 * 1024 + whole


@pytest.mark.parametrize(
    ("strategy", "bytes_each"),
    [
        pytest.param(Strategy(), 0, id="read once"),
        pytest.param(Strategy(accumulation=2), 2, id="several micro-batches"),
        pytest.param(Strategy(recompute="full"), 2, id="recomputed"),
        pytest.param(Strategy(accumulation=2, zero_stage=3, dp_size=2), 0, id="gathered each time"),
    ],
)
def test_codes_of_weights_in_fp8_are_kept_if_a_step_reads_them_again(strategy: Strategy, bytes_each: int) -> None:
    shape = gpt(1024, 8)
    (stage,) = stages_of(shape, 1, "balanced", 2048, checkpointed=False)
    wide, narrow = (
        stage_memory(Workload(shape=shape, sequence=2048, precision=precision), strategy, stage, 0).parameters
        for precision in ("bf16", "fp8")
    )
    assert narrow - wide == bytes_each * 4 * 12 * 1024**2  # matrices of four layers


def test_layers_in_fp8_keep_codes_of_their_inputs() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    dense = decoder_of({**sizes, "model_type": "llama", "num_hidden_layers": 1, "intermediate_size": 96}, "dense")
    mixed = decoder_of(MOE, "mixtral")
    adapters = Lora(rank=4, targets=targets_of(["all-linear"]))
    for shape, inputs, lora in ((dense, 3 * 64 + 96, None), (mixed, 2 * 64, None), (dense, 0, adapters)):
        wide, narrow = (
            layer_activations(
                Workload(shape=shape, sequence=16, precision=precision, lora=lora), Strategy(), shape.layers[0]
            )
            for precision in ("bf16", "fp8")
        )
        assert wide - narrow == 16 * inputs  # a byte less for each: of experts and adapters stay in bf16


def test_a_layer_of_experts_keeps_the_tokens_that_are_sent_to_them() -> None:
    shape = decoder_of(MOE, "mixtral")
    layer, work = shape.layers[0], Workload(shape=shape, sequence=16, habits=FUSED)
    one, two = (layer_activations(work, Strategy(), replace(layer, top_k=k)) for k in (1, 2))
    assert two - one == 16 * (32 * 4 * 2 + 2 * 64 * 2)  # two into the activation, one out, the product; in and out
    parts, wholes = (layer_activations(work, Strategy(tp_size=2, ep_size=e), layer) for e in (1, 2))
    assert parts - wholes == 16 * 2 * 2 * 64 * 2 / 2  # a rank sees the tokens of its own experts alone


def test_repeated_keys_are_kept_as_often_as_they_are_written_out() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 8}
    shape = decoder_of(sizes | {"num_key_value_heads": 2}, "grouped")
    layer, strategy = shape.layers[0], Strategy()
    plain, fused = (
        layer_activations(Workload(shape=shape, sequence=1, habits=Habits(fused_elementwise=on)), strategy, layer)
        for on in (False, True)
    )
    norms = 64 * 2 * (8 - 4)  # an input in fp32 and the normalised value besides
    assert plain - fused == norms + (16 + 16) * 3 * 2


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_as_many_micro_batches_are_in_flight_as_the_schedule_has(stages: int, micro_batches: int, data: st.DataObject):
    index = data.draw(st.integers(0, stages - 1))
    shape = gpt(64, 4)
    work, parts = megatron(shape, 32), ModelChunks(stages)
    stage = Stage(layers=((shape.layers[0], 2),), is_first=index == 0, is_last=index == stages - 1)
    each = 2 * layer_activations(work, Strategy(), shape.layers[0])

    def held(schedule: str) -> float:
        strategy = Strategy(pp_size=stages, accumulation=micro_batches, schedule=schedule)  # type: ignore[arg-type]
        return stage_activations(work, strategy, stage, index) / each

    assert held("1f1b") == most_in_flight(one_forward_one_backward(parts, micro_batches, index))
    now = most = 0  # a weight gradient that is put off keeps its activations
    for one in zero_bubble_h1(parts, micro_batches, index):
        now += (one.kind is Kind.FORWARD) - (one.kind is Kind.WEIGHT_GRADIENTS)
        most = max(most, now)
    assert most <= held("zero-bubble") <= most + 1


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 19))
def test_stages_of_several_chunks_hold_what_their_schedule_has_begun(
    stages: int, each: int, micro_batches: int
) -> None:
    round_, folded = ModelChunks(stages, each), ModelChunks(stages, 2, folded=True)
    one = Strategy(pp_size=stages, accumulation=micro_batches, chunks=each)
    v_shaped = replace(one, chunks=1, schedule="zero-bubble-v")
    for index in range(stages):
        assert each * in_flight(one, index) == pytest.approx(most_in_flight(interleaved(round_, micro_batches, index)))
        now = most = 0
        for each_pass in zero_bubble_v(folded, micro_batches, index):
            now += (each_pass.kind is Kind.FORWARD) - (each_pass.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENTS))
            most = max(most, now)
        assert most <= 2 * in_flight(v_shaped, index)
        if micro_batches >= 2 * stages:
            assert most == 2 * in_flight(v_shaped, index)


def test_a_stage_has_the_layers_of_all_its_parts() -> None:
    shape = gpt(64, 4, layers=8)
    method = "type:DecoderLayer"  # two of eight layers in each of four parts
    round_ = stages_of(shape, 2, method, 32, False, 2)
    folded = stages_of(shape, 2, method, 32, False, 2, True)
    assert [stage.depth for stage in (*round_, *folded)] == [4, 4, 4, 4]
    assert [(stage.is_first, stage.is_last) for stage in round_] == [(True, False), (False, True)]
    assert [(stage.is_first, stage.is_last) for stage in folded] == [(True, True), (False, False)]
    with pytest.raises(UserError):
        stages_of(shape, 8, "balanced", 32, False, 2)


def test_interleaving_keeps_more_by_the_formula() -> None:
    shape = gpt(64, 4, layers=8)
    plain = Strategy(pp_size=4, accumulation=8)
    stage = stages_of(shape, 4, "balanced", 32, checkpointed=False)[0]
    one, two = (stage_activations(megatron(shape, 32), replace(plain, chunks=v), stage, 0) for v in (1, 2))
    assert two / one == pytest.approx(1 + 3 / (4 * 2))


@pytest.mark.parametrize(
    ("strategy", "precision", "parameters", "gradients", "optimizer", "host"),
    [
        pytest.param(Strategy(dp_size=4), "bf16", 2, 2, 8 + 4, 0, id="bf16 without ZeRO has a master copy"),
        pytest.param(Strategy(dp_size=4, zero_stage=1), "fp16", 2, 2, 3, 0, id="fp16 sums in fp16"),
        pytest.param(Strategy(dp_size=4, zero_stage=2, offload="optimizer"), "bf16", 2, 0, 0, 3 + 1, id="states away"),
        pytest.param(
            Strategy(dp_size=4, zero_stage=2, reduces_once=True), "bf16", 2, 4 + 1, 3, 0, id="all sums, and the means"
        ),
        pytest.param(
            Strategy(dp_size=4, zero_stage=1, offload="optimizer"), "bf16", 2, 6, 0, 3 + 6, id="gradients stay"
        ),
        pytest.param(
            Strategy(dp_size=4, zero_stage=3, offload="optimizer+parameters"), "fp32", 0, 0, 0, 1 + 2 + 3, id="all away"
        ),
    ],
)
def test_states_lie_where_deepspeed_puts_them(
    strategy: Strategy, precision: str, parameters: float, gradients: float, optimizer: float, host: float
) -> None:
    shape = gpt(64, 4)
    work = Workload(shape=shape, sequence=32, precision=precision)
    (stage,) = stages_of(shape, 1, "balanced", 32, checkpointed=False)
    held, memory = local_parameters(work, strategy, stage), stage_memory(work, strategy, stage, 0)
    per_parameter = [memory.parameters, memory.gradients, memory.optimizer, memory.host]
    assert [size / held for size in per_parameter] == [parameters, gradients, optimizer, host]
    assert memory.states == memory.parameters + memory.gradients + memory.optimizer


@pytest.mark.parametrize(
    ("kept", "strategy", "parameters", "optimizer", "host"),
    [
        pytest.param({"states": 0}, Strategy(dp_size=4, zero_stage=2), 2, 1, 0, id="SGD: the master copy alone"),
        pytest.param({"states": 1}, Strategy(dp_size=4, zero_stage=2), 2, 2, 0, id="Lion"),
        pytest.param(
            {"states": 2, "state_bytes": 2, "master_bytes": 2}, Strategy(dp_size=4, zero_stage=2), 2, 1.5, 0, id="bf16"
        ),
        pytest.param(
            {"states": 2}, Strategy(dp_size=4, zero_stage=3, offload="parameters"), 0, 3, 0.5, id="parameters alone"
        ),
    ],
)
def test_an_optimizer_holds_what_it_keeps(
    kept: dict[str, int], strategy: Strategy, parameters: float, optimizer: float, host: float
) -> None:
    shape = gpt(64, 4)
    work = Workload(shape=shape, sequence=32, precision="bf16", other_states=kept["states"], **kept)
    (stage,) = stages_of(shape, 1, "balanced", 32, checkpointed=False)
    held, memory = local_parameters(work, strategy, stage), stage_memory(work, strategy, stage, 0)
    assert [size / held for size in (memory.parameters, memory.optimizer, memory.host)] == [parameters, optimizer, host]


@pytest.mark.parametrize(
    ("precision", "in_place", "tensor", "each"),
    [
        pytest.param("fp32", True, 1, 4 + 4, id="fp32: a chunk besides"),
        pytest.param("bf16", True, 1, 2 + 8, id="bf16: a chunk and its copy in fp32"),
        pytest.param("bf16", True, 3, 2 + 8, id="shares are rounded up"),
        pytest.param("bf16", False, 1, 2 * 2 + 8, id="with copies: both in bf16, both in fp32"),
        pytest.param("fp32", False, 1, 4 * 4, id="fp32 with copies"),
    ],
)
def test_logits_are_held_as_the_loss_makes_them(precision: str, in_place: bool, tensor: int, each: float) -> None:
    shape = gpt(64, 4)
    work = Workload(shape=shape, sequence=32, precision=precision, habits=Habits(loss_in_place=in_place))
    (stage,) = stages_of(shape, 1, "balanced", 32, checkpointed=False)
    entries = 2 * 32 * -(-8 // tensor)
    assert entries < LOSS_CHUNK
    strategy = Strategy(micro_batch=2, tp_size=tensor, accumulation=2)  # else gradients take their place
    assert stage_memory(work, strategy, stage, 0).logits == entries * each


@pytest.mark.parametrize(
    ("strategy", "experts"),
    [
        pytest.param(Strategy(), 1.0, id="all"),
        pytest.param(Strategy(tp_size=4), 1 / 4, id="a part of each"),
        pytest.param(Strategy(tp_size=4, ep_size=4), 1 / 4, id="whole ones"),
        pytest.param(Strategy(dp_size=8, ep_size=8), 1 / 8, id="whole ones over data ranks"),
    ],
)
def test_experts_are_shared_out_and_routers_and_norms_are_not(strategy: Strategy, experts: float) -> None:
    layer = decoder_of(MOE, "mixtral").layers[0]
    router, norms = 8 * 64, 2 * 64
    held = layer_parameters(strategy, layer) - router - norms
    assert held == layer.attention_parameters / strategy.tp_size + 8 * 3 * 64 * 32 * experts
