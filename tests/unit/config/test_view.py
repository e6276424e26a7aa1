"""What the rules are given of a config: sizes, stages and switches as DeepSpeed will have them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checking.rules.view import RunView, is_comment
from harness.checking.schema.normalize import as_read
from harness.config.model.sharding import Heads, shard_range
from harness.config.text.document import from_values
from harness.config.values.idle_keys import without_idle
from harness.config.values.pointers import bf16_section, lookup, put, whole
from harness.schedules import INTERLEAVED, SCHEDULES, ModelChunks, model_chunks

FOLDED = [name for name, each in SCHEDULES.items() if each.folded]


def view(config: dict[str, Any], **more: Any) -> RunView:
    return RunView.of(from_values(config), **more)


@pytest.mark.parametrize(
    ("config", "stage"),
    [
        pytest.param({}, 0, id="absent"),
        pytest.param({"zero_optimization": {}}, 0, id="empty"),
        pytest.param({"zero_optimization": True}, 1, id="a switch"),
        pytest.param({"zero_optimization": False}, 0, id="off"),
        pytest.param({"zero_optimization": {"stage": 3}}, 3, id="a number"),
        pytest.param({"zero_optimization": {"stage": "2"}}, 2, id="in quotes"),
        pytest.param({"zero_optimization": {"stage": True}}, 1, id="a switch for a number"),
        pytest.param({"zero_optimization": {"stage": "auto"}}, 0, id="auto is dropped"),
        pytest.param({"zero_optimization": {"stage": "three"}}, None, id="a word"),
        pytest.param({"zero_optimization": {"stage": None}}, None, id="null"),
        pytest.param({"zero_optimization": [3]}, 0, id="a list has no stage"),
    ],
)
def test_the_zero_stage(config: dict[str, Any], stage: int | None) -> None:
    assert view(config).zero_stage == stage


CUT = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 3}


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        pytest.param({}, None, id="not known"),
        pytest.param({"world_size": 8}, 2, id="copies of four"),
        pytest.param({"world_size": 6}, None, id="no whole copies"),
        pytest.param({"world_size": 6, "tp_override": 1}, 3, id="by a flag"),
        pytest.param({"world_size": 6, "target": "deepspeed"}, 6, id="all ranks"),
        pytest.param({"world_size": 8, "target": "hf"}, 8, id="all ranks for HF"),
    ],
)
def test_data_parallel_ranks(options: dict[str, Any], ranks: int | None) -> None:
    assert view(CUT, **options).dp_size == ranks


@pytest.mark.parametrize(
    ("options", "batch_ranks"),
    [
        pytest.param({}, None, id="not known"),
        pytest.param({"world_size": 12}, 1, id="three ranks a sequence"),
        pytest.param({"world_size": 8}, None, id="which do not divide"),
        pytest.param({"world_size": 8, "cp_override": 2}, 1, id="by a flag"),
        pytest.param({"world_size": 6, "target": "deepspeed"}, 2, id="of all ranks"),
    ],
)
def test_data_ranks_that_read_different_samples(options: dict[str, Any], batch_ranks: int | None) -> None:
    assert view(CUT, **options).batch_ranks == batch_ranks


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bfloat16": {"enabled": 1}}, "bf16"),
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": "on"}}, "fp16"),
        ({"fp16": {"enabled": "auto"}}, "fp32"),
    ],
)
def test_the_precision(config: dict[str, Any], precision: str) -> None:
    assert view(config).precision == precision


def test_experts_are_spread_where_the_section_is_on() -> None:
    section = {"expert_parallel": {"enabled": True, "autoep_size": 4}}
    assert view(section).ep_size == 4 and view(section, ep_override=2).ep_size == 2
    assert view({"expert_parallel": {"autoep_size": 4}}).ep_size == 1
    assert view({}, ep_override=2).ep_size == 2


@pytest.mark.parametrize(
    ("section", "backend"),
    [
        ({}, None),
        ({"backend": "eager"}, None),
        ({"enabled": True}, "inductor"),
        ({"enabled": "yes", "backend": "eager"}, "eager"),
        ({"enabled": True, "backend": "auto"}, "inductor"),
    ],
)
def test_the_backend_of_compiled_layers(section: dict[str, Any], backend: str | None) -> None:
    assert view({"compile": section}).compile_backend == backend


def test_options_of_the_compiler() -> None:
    section = {"mode": "reduce-overhead", "dynamic": None, "fullgraph": "auto", "kwargs": {"options": {"a": 1}}}
    assert view({"compile": section}).compile_options == {"mode": "reduce-overhead", "options": {"a": 1}}
    assert view({"compile": {"mode": "auto"}}).compile_options == {}


def test_a_key_is_there_whatever_its_value() -> None:
    found = view({"a": None, "section": {"b": False}, "word": "x"})
    assert found.has("/a") and found.has("/section/b")
    assert not (found.has("/b") or found.has("/word/x") or found.has("/missing/b"))
    assert found.section("/word") == {} and found.get("/section/b/deeper") is None


@pytest.mark.parametrize(
    ("name", "is_said"), [("_x", True), ("$x", True), ("//", True), ("#", True), ("My COMMENT", True), ("x_", False)]
)
def test_comments_are_for_people(name: str, is_said: bool) -> None:
    assert is_comment(name) == is_said


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (5e8, 500_000_000),
        (-0.0, 0),
        (0.5, None),
        (True, None),
        ("3", None),
        (None, None),
        (float("inf"), None),
        (float("nan"), None),
        (10**400, 10**400),
    ],
)
def test_a_whole_number(value: object, number: int | None) -> None:
    assert whole(value) == number


def test_of_two_names_the_new_one_is_read() -> None:
    assert bf16_section({}) == "bf16" and bf16_section({"bfloat16": {}}) == "bfloat16"
    assert bf16_section({"bfloat16": {}, "bf16": {}}) == "bf16"
    assert bf16_section({"bfloat16": {}, "bf16": None}) == "bfloat16"


VALUES = st.sampled_from([None, True, "1", "true", 1, 0, 2.0, "2.0", "auto", "cpu", [1], {"x": "1"}])
KEYS = st.sampled_from(
    [
        "/zero_optimization/stage",
        "/zero_optimization/overlap_comm",
        "/zero_optimization",
        "/bf16/enabled",
        "/x/y",
        "/zero_optimization/cpu_offload",
        "/zero_optimization/offload_optimizer/device",
        "/tensor_parallel/autotp_size",
        "/pipeline/stages",
        "/train_batch_size",
        "/fp16/loss_scale",
    ]
)


@settings(max_examples=60)
@given(st.lists(st.tuples(KEYS, VALUES), max_size=5))
def test_what_was_read_once_is_read_the_same_again(edits: list[tuple[str, object]]) -> None:
    config: dict[str, Any] = {}
    for pointer, value in edits:
        section = lookup(config, pointer.rsplit("/", 1)[0])
        if pointer.count("/") == 1 or section is None or isinstance(section, dict):
            try:
                put(config, pointer, copy.deepcopy(value))
            except (AttributeError, TypeError):
                continue
    before = repr(config)
    once = as_read(config)
    assert repr(as_read(once)) == repr(once)
    assert repr(config) == before  # a copy


@pytest.mark.parametrize(
    ("zero", "read"),
    [
        (True, {"stage": 1}),
        (False, {"stage": 0}),
        ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}),
        ({"cpu_offload": "true"}, {"offload_optimizer": {"device": "cpu"}}),
        ({"cpu_offload": False}, {"cpu_offload": False}),
        ({"cpu_offload": True, "offload_optimizer": {}}, {"cpu_offload": True, "offload_optimizer": {}}),
        ({"stage": "three", "surprise": "1"}, {"stage": "three", "surprise": "1"}),
    ],
)
def test_old_forms_are_read_as_new_ones(zero: object, read: object) -> None:
    assert as_read({"zero_optimization": zero})["zero_optimization"] == read


def test_what_would_break_a_run_is_left_out_of_a_copy() -> None:
    config = {"autotuning": {"enabled": True}, "zero_optimization": {"stage": 2, "zenflow": {}}, "fp16": "odd"}
    kept = without_idle(config)
    assert kept == {"zero_optimization": {"stage": 2}, "fp16": "odd", "zero_force_ds_cpu_optimizer": False}
    assert "autotuning" in config and "zenflow" in config["zero_optimization"]
    assert "zero_force_ds_cpu_optimizer" not in without_idle({"optimizer": {"type": "AdamW"}})


STAGES = st.integers(1, 6)


@given(STAGES, st.integers(1, 4), st.booleans())
def test_every_chunk_has_one_stage(stages: int, each: int, folded: bool) -> None:
    chunks = ModelChunks(stages, each, folded)
    held = [chunk for stage in range(stages) for chunk in chunks.of_stage(stage)]
    assert sorted(held) == list(range(chunks.count))
    assert all(len(chunks.of_stage(stage)) == each for stage in range(stages))
    assert chunks.count - 1 in chunks.of_stage(chunks.loss_stage)
    if folded and each > 1 and stages > 1:  # the turn of a fold needs no message
        assert chunks.stage_of(stages - 1) == chunks.stage_of(stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("asked", [None, 3])
def test_a_schedule_has_its_parts(schedule: str, asked: int | None) -> None:
    found = model_chunks(4, schedule, asked)
    several = asked or 2
    assert found.per_stage == (2 if schedule in FOLDED else several if schedule == INTERLEAVED else 1)
    assert found.folded == (schedule in FOLDED)
    assert model_chunks(1, schedule, asked) == ModelChunks(1)


@given(st.integers(0, 50), st.integers(1, 9))
def test_stretches_are_dealt_out_completely(total: int, size: int) -> None:
    chunks = [shard_range(total, index, size) for index in range(size)]
    assert chunks[0][0] == 0 and chunks[-1][1] == total
    assert all(before[1] == after[0] for before, after in itertools.pairwise(chunks))
    lengths = [stop - start for start, stop in chunks]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 24))
def test_query_heads_follow_their_key_value_heads(key_value: int, group: int, size: int) -> None:
    heads = Heads(query=key_value * group, key_value=key_value)
    assert heads.fit(size) == (size <= heads.query)
    if not heads.fit(size):
        return
    queries, keys = heads.queries(size), heads.key_values(size)
    assert len(queries) == len(keys) == size
    assert [head for start, stop in queries for head in range(start, stop)] == list(range(heads.query))
    for (start, stop), (first, last) in zip(queries, keys, strict=True):
        assert stop > start and {head // group for head in range(start, stop)} == set(range(first, last))


def test_heads_without_groups_are_dealt_out_alone() -> None:
    odd = Heads(query=6, key_value=4)
    assert [odd.fit(size) for size in (1, 2, 3, 4)] == [True, True, False, False]
    assert odd.queries(2) == [(0, 3), (3, 6)] and odd.key_values(2) == [(0, 2), (2, 4)]
