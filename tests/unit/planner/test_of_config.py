"""From a config to what is predicted, and from a layout back to its config: both say the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checking import resolve
from harness.config import AutoValues
from harness.config.text.diagnostic import ConfigError
from harness.config.text.document import from_text
from harness.config.values.batch import bubble
from harness.errors import UserError
from harness.planner.estimate import estimate, of_config
from harness.planner.memory import in_flight, layer_activations, stage_activations
from harness.planner.model_config import decoder_of, read_decoder
from harness.planner.preset import preset, write_preset
from harness.planner.workload import Offload, Strategy, Workload, stages_of
from harness.schedules import INTERLEAVED
from tests.unit.planner.devices import device

SHAPE = read_decoder("tiny-llama")
# layers alone, so that stages are equal: nothing looks up and nothing is predicted
EVEN, LONGER = (
    decoder_of({"hidden_size": 1024, "num_hidden_layers": count, "num_attention_heads": 8, "vocab_size": 1}, "even")
    for count in (24, 48)
)


PREDICTED: dict[str, str] = {
    "1f1b": "1f1b",
    "zero-bubble": "zero-bubble",
    INTERLEAVED: "1f1b",
    "zero-bubble-v": "zero-bubble-v",
}


def strategy_of(config: dict[str, Any], world_size: int) -> tuple[Workload, Strategy]:
    values = AutoValues(world_size=world_size, hidden_size=SHAPE.hidden, given=frozenset({"world_size"}))
    document = from_text(json.dumps(config), "config.json")
    return of_config(resolve(document, values, model="tiny-llama"), SHAPE, 128, on_cpu=False)


def config(**changes: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}} | changes


@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        pytest.param({"stage": 0}, "none", id="nothing"),
        pytest.param({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer", id="states"),
        pytest.param({"stage": 2, "offload_optimizer": {"device": "none"}}, "none", id="states, to nowhere"),
        pytest.param({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "optimizer", id="states of ZeRO-3"),
        pytest.param({"stage": 3, "offload_param": {"device": "cpu"}}, "parameters", id="parameters alone"),
        pytest.param(
            {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            "optimizer+parameters",
            id="parameters too",
        ),
    ],
)
def test_what_is_offloaded_is_read(zero: dict[str, Any], offload: str) -> None:
    assert strategy_of(config(zero_optimization=zero), 2)[1].offload == offload


@pytest.mark.parametrize(
    ("changes", "states", "other_states", "state_bytes", "master_bytes"),
    [
        ({}, 2, 2, 4, 4),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, 0, 0, 4, 4),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, 1, 1, 4, 4),
        ({"optimizer": {"type": "Lion", "params": {"lr": 0.1}}}, 1, 1, 4, 4),
        ({"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}, 1, 2, 4, 4),
        ({"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}, 2, 2, 2, 2),
    ],
    ids=["AdamW", "SGD", "momentum", "Lion", "Muon", "bf16"],
)
def test_the_optimizer_s_states_are_counted_as_they_are(
    changes: dict[str, Any], states: int, other_states: int, state_bytes: int, master_bytes: int
) -> None:
    made = config(zero_optimization={"stage": 2}, zero_allow_untested_optimizer=True, **changes)
    made["bf16"] = {"enabled": True, **changes.get("bf16", {})}
    work, _ = strategy_of(made, 2)
    found = (work.states, work.other_states, work.state_bytes, work.master_bytes)
    assert found == (states, other_states, state_bytes, master_bytes)


@pytest.mark.parametrize(
    ("changes", "overlap", "flat"),
    [
        pytest.param({"zero_optimization": {"stage": 1}}, True, True, id="flat sums overlap unless told"),
        pytest.param({"zero_optimization": {"stage": 1, "overlap_comm": False}}, False, True, id="told not to"),
        pytest.param({"zero_optimization": {"stage": 2}}, False, False, id="stage 2 overlaps when asked"),
        pytest.param({"zero_optimization": {"stage": 2, "overlap_comm": True}}, True, False, id="asked"),
        pytest.param({"zero_optimization": {"stage": 3}}, True, False, id="stage 3 overlaps unless told"),
        pytest.param({"zero_optimization": {"stage": 3, "overlap_comm": False}}, False, False, id="told"),
        pytest.param({"bf16": {"enabled": False}}, False, False, id="fp32"),
        pytest.param(
            {"zero_optimization": {"stage": 1}, "bf16": {"enabled": False}}, True, True, id="stage 1 of fp32 likewise"
        ),
        pytest.param(
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            False,
            False,
            id="offloaded sums are DeepSpeed's",
        ),
    ],
)
def test_what_travels_meanwhile_is_as_in_a_run(changes: dict[str, Any], overlap: bool, flat: bool) -> None:
    strategy = strategy_of(config(**changes), 2)[1]
    assert (strategy.overlap_data, strategy.flat_sums) == (overlap, flat)


@pytest.mark.parametrize(
    ("changes", "precision", "gradient_bytes"),
    [
        pytest.param({}, "bf16", 4, id="the default: sums in fp32"),
        pytest.param(
            {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}},
            "bf16",
            4,
            id="sums in fp32",
        ),
        pytest.param({"bf16": {"enabled": False}}, "fp32", 4, id="fp32"),
    ],
)
def test_gradients_are_as_wide_as_the_config_says(changes: dict[str, Any], precision: str, gradient_bytes: int) -> None:
    workload, _ = strategy_of(config(**changes), 2)
    assert (workload.precision, workload.gradient_bytes) == (precision, gradient_bytes)


@pytest.mark.parametrize(
    ("schedule", "predicted", "parts"),
    [
        ("1f1b", "1f1b", 1),
        ("gpipe", "gpipe", 1),
        ("zero-bubble", "zero-bubble", 1),
        (INTERLEAVED, "1f1b", 2),
        ("zero-bubble-v", "zero-bubble-v", 1),
        ("dualpipe-v", "zero-bubble-v", 1),
    ],
)
def test_a_schedule_is_predicted_by_its_like(schedule: str, predicted: str, parts: int) -> None:
    found = strategy_of(config(pipeline={"stages": 2, "schedule": schedule}), 2)[1]
    assert (found.pp_size, found.schedule, found.chunks) == (2, predicted, parts)


@given(st.sampled_from([2, 3, 4, 6, 8]), st.integers(1, 20), st.sampled_from(list(PREDICTED)))
def test_a_pipeline_idles_by_the_formula(stages: int, micro_batches: int, name: str) -> None:
    parts = 3 if name == INTERLEAVED else 1
    strategy = Strategy(
        pp_size=stages,
        accumulation=micro_batches,
        schedule=PREDICTED[name],
        chunks=parts,
        partition="type:DecoderLayer",
    )
    shape = LONGER if name == "zero-bubble-v" else EVEN  # layers that all numbers of parts divide
    seconds = estimate(device(), Workload(shape=shape, sequence=64, precision="fp32"), strategy).seconds
    assert seconds.idle == pytest.approx(
        bubble(stages, micro_batches, name, parts), abs=0.002
    )  # the two ends differ a little


ORDERS: list[tuple[str, int]] = [
    ("1f1b", 1),
    ("zero-bubble", 1),
    ("1f1b", 2),
    ("zero-bubble-v", 1),
]
STRATEGIES = st.one_of(
    st.builds(
        lambda p, t, d, m, a, again, order, shares: Strategy(
            pp_size=p, tp_size=t, dp_size=d, micro_batch=m, accumulation=a, zero_stage=1, flat_sums=True,
            overlap_data=True, recompute="full" if again else "none", sequence_parallel=shares and t > 1,
            schedule=order[0] if p > 1 else "1f1b", chunks=order[1] if p > 1 else 1,
        ),
        *[st.sampled_from([1, 2])] * 2, *[st.integers(1, 4)] * 3, st.booleans(), st.sampled_from(ORDERS), st.booleans(),
    ),
    st.builds(
        lambda d, m, zero: Strategy(
            dp_size=d, micro_batch=m, zero_stage=zero[0], offload=zero[1], overlap_data=True,
            gathers_once=zero == (3, "none"),
        ),
        st.integers(2, 4), st.integers(1, 4),
        st.sampled_from([(2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer+parameters")]),
    ),
)  # fmt: skip


@given(STRATEGIES)
def test_the_config_of_a_layout_is_that_layout(strategy: Strategy) -> None:
    _, again = strategy_of(preset(strategy, "bf16"), strategy.world_size)
    said = {"bucket": again.bucket, "split_table": True}  # no bucket without ZeRO, and as the plans have it
    assert again == Strategy(**{**vars(strategy), **said})


@pytest.mark.parametrize(
    ("precision", "on"), [("fp32", (False, False)), ("bf16", (True, False)), ("fp16", (False, True))]
)
def test_a_preset_says_its_precision(precision: str, on: tuple[bool, bool]) -> None:
    made = preset(Strategy(), precision)
    assert (made["bf16"]["enabled"], made["fp16"]["enabled"]) == on
    assert "stages" not in made["pipeline"] and "tensor_parallel" not in made


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_an_optimizer_of_the_harness_s_own_is_let_run_on_the_host(offload: Offload) -> None:
    made = preset(Strategy(dp_size=2, zero_stage=2, offload=offload), "bf16")
    assert made.get("zero_force_ds_cpu_optimizer") == (None if offload == "none" else False)


def test_a_preset_that_is_refused_or_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        write_preset(tmp_path / "a.json", Strategy(tp_size=2, pp_size=99), "bf16", "tiny-llama")
    assert len(refused.value.diagnostics) == 1 and not (tmp_path / "a.json").exists()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"^--write .*folder: cannot be written: is a directory"):
        write_preset(tmp_path / "folder", Strategy(), "bf16", "tiny-llama")


@pytest.mark.parametrize("method", ["balanced", "measured", "uniform", "parameters", "type:DecoderLayer"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_stages_hold_every_layer_once_and_the_ends_are_at_the_ends(method: str, count: int) -> None:
    stages = stages_of(EVEN, count, method, 64, checkpointed=False)
    assert sum(stage.depth for stage in stages) == 24 and len(stages) == count
    assert [stage.is_first for stage in stages] == [True] + [False] * (count - 1)
    assert [stage.is_last for stage in stages] == [False] * (count - 1) + [True]


def test_more_stages_than_layers_are_refused_as_in_a_run() -> None:
    with pytest.raises(UserError, match=r"^pipeline\.stages: 27 stages for a model of 26 layers: use 1 to 26"):
        stages_of(EVEN, 27, "balanced", 64, checkpointed=False)


def test_the_ends_of_a_pipeline_may_stand_alone() -> None:
    first, *middle, last = stages_of(EVEN, 26, "uniform", 64, checkpointed=False)
    assert (first.depth, last.depth) == (0, 0) and {stage.depth for stage in middle} == {1}


def test_gpipe_keeps_every_micro_batch_and_1f1b_as_many_as_there_are_stages() -> None:
    """Huang et al. 2019: all forward passes come before the first backward."""
    two = {"stages": 2, "activation_checkpoint_interval": 0}
    flights = {}
    for schedule in ("1f1b", "gpipe"):
        parts = config(train_batch_size=16, pipeline={**two, "schedule": schedule})
        strategy = strategy_of(parts, 2)[1]
        assert strategy.accumulation == 16 and strategy.schedule_name == schedule
        flights[schedule] = [in_flight(strategy, stage) for stage in range(2)]
    assert flights == {"1f1b": [2, 1], "gpipe": [16, 16]}


def test_layers_that_are_recomputed_together_keep_one_input_and_stand_together() -> None:
    """Chen et al. 2016: of k layers at a time one input is kept, and all activations of k stand in the backward."""
    layers = LONGER.layers[:8]
    shape = replace(LONGER, layers=layers)
    workload = Workload(shape=shape, sequence=1024)
    stage = stages_of(shape, 1, "balanced", 1024, True)[0]
    state, one = 1024 * 1024 * 2, layer_activations(workload, Strategy(recompute="full"), layers[0])
    for every, kept in ((1, 8), (3, 3), (4, 2), (100, 1)):
        strategy = Strategy(recompute="full", recompute_every=every)
        assert stage_activations(workload, strategy, stage, 0) == kept * state + min(every, 8) * one
    interval = {"activation_checkpoint_interval": 4}
    assert strategy_of(config(pipeline=interval), 1)[1].recompute_every == 4
    assert preset(strategy_of(config(pipeline=interval), 1)[1], "bf16")["pipeline"] == interval


def test_buckets_are_allocated_whole_and_chosen_by_the_model_where_the_file_has_none() -> None:
    """A model of 0.9 M parameters would take 2 GiB a bucket in float32 by DeepSpeed's default."""
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}}
    given = {**zero, "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000}}
    small, large = (estimate(device(), *strategy_of(config(**one), 2)).peak_bytes / 2**30 for one in (zero, given))
    assert small < 0.2 and 1.8 < large < 2.1
    overlapping = {**given, "zero_optimization": {**given["zero_optimization"], "overlap_comm": True}}
    assert (
        3.7
        < estimate(replace(device(), compute_units=8), *strategy_of(config(**overlapping), 2)).peak_bytes / 2**30
        < 4
    )


@pytest.mark.parametrize(
    ("optimizer", "states", "each"), [("AdamW", 2, 4), ("AdamW8bit", 2, 1 + 4 / 256), ("PagedLion8bit", 1, 1 + 4 / 256)]
)
def test_a_state_in_8_bits_takes_a_byte_and_its_part_of_a_scale(optimizer: str, states: int, each: float) -> None:
    workload, _ = strategy_of(config(optimizer={"type": optimizer, "params": {}}), 1)
    assert (workload.states, workload.state_bytes) == (states, each)
