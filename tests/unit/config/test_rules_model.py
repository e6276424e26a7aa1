"""The borders of the rules that hold a layout against a model, and of those about the pipeline and its schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.schedules import DEFAULT, SCHEDULES
from tests.unit.config.said import said


def at(pointer: str, words: str, severity: str = "error") -> list[str]:
    return [f"{severity} {pointer}: {words}"] if words else []


def pipe(stages: int, *, steps: object = 8, **more: object) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": steps}
    return {**sizes, "pipeline": {"stages": stages, **more}}


def tensor(size: int, experts: int = 0) -> dict[str, Any]:
    spread = {"expert_parallel": {"enabled": True, "autoep_size": experts}} if experts else {}
    return {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": size}, **spread}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model of 4 layers, 6 heads over 2 key/value heads, 3 experts, 10 columns."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "num_experts": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_tomorrow", "intermediate_size": 10, **sizes}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("config", "pointer", "words"),
    [
        pytest.param(pipe(4), "stages", "", id="a layer a stage"),
        pytest.param(
            pipe(5), "stages", "5 pipeline stages, but the model has only 4 decoder layers; use at most 4 stages"
        ),
        pytest.param(pipe(2, schedule="interleaved"), "schedule", "", id="a layer a chunk"),
        pytest.param(
            pipe(2, schedule="interleaved", chunks_per_stage=3),
            "schedule",
            "2 pipeline stages of 3 model chunks, but the model has only 4 decoder layers; "
            "use at most 4 model chunks in all, or a schedule with one a stage",
            id="more chunks than layers",
        ),
        pytest.param(
            pipe(3, schedule="dualpipe-v"),
            "schedule",
            "3 pipeline stages of 2 model chunks, but the model has only 4 decoder layers; "
            "use at most 4 model chunks in all, or a schedule with one a stage",
            id="more folded chunks than layers",
        ),
        pytest.param(pipe(1, schedule="interleaved", chunks_per_stage=9), "schedule", "", id="one stage has one chunk"),
    ],
)
def test_no_stage_is_empty(config: dict[str, Any], pointer: str, words: str, model: str) -> None:
    assert said(config, "DS901", model=model) == at(f"/pipeline/{pointer}", words)
    assert said(config, "DS901", model=model, target="deepspeed") == said(config, "DS901") == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (tensor(6), ""),
        (
            tensor(7),
            "7 tensor-parallel ranks, but the model has only 6 attention heads; "
            "set tensor_parallel.autotp_size to at most 6",
        ),
    ],
)
def test_each_rank_has_a_head(config: dict[str, Any], words: str, model: str) -> None:
    assert said(config, "DS902", model=model) == at("/tensor_parallel/autotp_size", words)


EVENLY = "; use a size that divides them evenly: all ranks wait for the one with the largest share"


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        pytest.param(tensor(1), "", id="one rank"),
        pytest.param(tensor(2), "", id="two ranks divide heads and columns"),
        pytest.param(
            tensor(3), "3 of 6 attention heads and 4 of 10 intermediate columns", id="a key/value head on two ranks"
        ),
        pytest.param(tensor(4), "2 of 6 attention heads and 3 of 10 intermediate columns", id="both"),
        pytest.param(tensor(3, 3), "3 of 6 attention heads", id="heads alone"),
    ],
)
def test_unequal_shares_are_counted(config: dict[str, Any], shares: str, model: str) -> None:
    size = config["tensor_parallel"]["autotp_size"]
    words = f"{size} tensor-parallel ranks get unequal shares: the largest is {shares}{EVENLY}" if shares else ""
    assert said(config, "DS903", model=model) == at("/tensor_parallel/autotp_size", words, "warning")


def test_experts_that_ranks_cannot_share_equally_are_counted(model: str) -> None:
    words = f"2 expert-parallel ranks get unequal shares: the largest is 2 of 3 experts{EVENLY}"
    for config in (tensor(2, 2), tensor(1, 2)):
        assert said(config, "DS903", model=model) == at("/expert_parallel/autoep_size", words, "warning")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (tensor(3, 3), ""),
        (
            tensor(4, 4),
            "4 expert-parallel ranks, but the model has only 3 experts; remove expert_parallel, "
            "so that each expert is split",
        ),
        (tensor(4), ""),
    ],
)
def test_each_rank_has_an_expert(config: dict[str, Any], words: str, model: str) -> None:
    assert said(config, "DS904", model=model) == at("/expert_parallel/autoep_size", words)
    if words:
        assert "experts" not in str(said(config, "DS903", model=model))


def test_sizes_that_the_model_does_not_say_are_not_held_against_it(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": "many", "num_attention_heads": None, "num_experts": 0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_tomorrow", **sizes}))
    for code in ("DS901", "DS902", "DS903", "DS904", "DS905", "DS906"):
        assert said({**pipe(99), **tensor(99, 99)}, code, model=str(tmp_path)) == []


@pytest.mark.parametrize(
    ("stages", "stage", "target", "severity"),
    [
        (2, 2, "harness", "error"),
        (2, 3, "harness", "error"),
        (2, 2, "deepspeed", "warning"),
        (2, 1, "harness", ""),
        (1, 3, "harness", ""),
    ],
)
def test_zero_2_has_no_pipeline(stages: int, stage: int, target: str, severity: str) -> None:
    words = f"ZeRO-{stage} cannot run with {stages} pipeline stages; "
    words += "use ZeRO-1 with the pipeline, or set pipeline.stages to 1"
    found = said({**pipe(stages), "zero_optimization": {"stage": stage}}, "DS601", target=target)
    assert found == at("/zero_optimization/stage", words if severity else "", severity)


REENTRANT = "reentrant checkpointing computes no gradient for a stage whose input is integer ids; "
REENTRANT += "set pipeline.use_reentrant to false"


@pytest.mark.parametrize(
    ("more", "target", "key"),
    [
        ({"activation_checkpoint_interval": 1, "use_reentrant": True}, "harness", "use_reentrant"),
        ({"activation_checkpoint_interval": 1}, "harness", ""),
        ({"activation_checkpoint_interval": 1}, "deepspeed", "activation_checkpoint_interval"),
        ({"activation_checkpoint_interval": 1, "use_reentrant": False}, "deepspeed", ""),
        ({"activation_checkpoint_interval": 0, "use_reentrant": True}, "harness", ""),
    ],
)
def test_reentrant_checkpointing_is_told(more: dict[str, Any], target: str, key: str) -> None:
    assert said(pipe(2, **more), "DS602", target=target) == at(f"/pipeline/{key}", REENTRANT * bool(key), "warning")


STEPS = "/gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("config", "pointer", "words"),
    [
        pytest.param(pipe(4, steps=12), STEPS, "", id="a fifth is fine"),
        pytest.param(
            pipe(4, steps=11),
            STEPS,
            "4 stages with 11 micro-batches are idle for 21% of a step; 12 micro-batches reduce that to 20%",
            id="a little more is told",
        ),
        pytest.param(pipe(4, steps="auto"), STEPS, "", id="auto"),
        pytest.param(
            {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}},
            "/pipeline/stages",
            "2 stages with 1 micro-batch are idle for 50% of a step; 4 micro-batches reduce that to 20%",
            id="absent is one",
        ),
        pytest.param({"train_batch_size": 64, "pipeline": {"stages": 2}}, "", "", id="it follows from the batch"),
        pytest.param(pipe(1, steps=1), STEPS, "", id="one stage waits for nobody"),
        pytest.param(
            pipe(4, steps=3, schedule="zero-bubble"),
            STEPS,
            "4 stages with 3 micro-batches are idle for 31% of a step; 4 micro-batches reduce that to 20%",
            id="another schedule idles less",
        ),
        pytest.param(pipe(4, steps=4, schedule="zero-bubble"), STEPS, "", id="and wants fewer"),
    ],
)
def test_idle_stages_are_told(config: dict[str, Any], pointer: str, words: str) -> None:
    assert said(config, "DS603") == at(pointer, words, "info")


WORDS = {
    "partition": ("DS604", "balanced, measured, uniform, parameters, type:REGEX"),
    "schedule": ("DS608", ", ".join(SCHEDULES)),
}


@pytest.mark.parametrize(
    ("key", "value", "is_known"),
    [
        *(("schedule", name, True) for name in SCHEDULES),
        ("schedule", "GPipe", True),
        ("schedule", "1F1B", True),
        ("schedule", None, True),
        ("schedule", "auto", True),
        ("schedule", "zb", False),
        ("schedule", 1, False),
        ("schedule", "", False),
        ("partition", "best", True),
        ("partition", "Uniform", True),
        ("partition", "type:.*Layer", True),
        ("partition", "TYPE:decoder", True),
        ("partition", "type:", False),
        ("partition", "type:[", False),  # no regular expression
        ("partition", "kind:x", False),
        ("partition", "", False),
        ("partition", ["uniform"], False),
    ],
)
def test_words_of_the_pipeline_are_known(key: str, value: object, is_known: bool) -> None:
    code, names = WORDS[key]
    words = "" if is_known else f"unknown {key} {value!r}; use one of {names}"
    assert said(pipe(2, **{key: value}), code) == at(f"/pipeline/{key}", words)
    assert said(pipe(1, **{key: value}), code) == at(f"/pipeline/{key}", words, "warning")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_deepspeed_lacks_is_told_in_a_config_for_it(name: str) -> None:
    words = f"{name} is a schedule of the harness; remove it, or train with the harness"
    assert said(pipe(2, schedule=name), "DS608", target="deepspeed") == at(
        "/pipeline/schedule", "" if name == DEFAULT else words, "warning"
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"chunks_per_stage": 2},
            "the schedule 1f1b has 1 model chunk a stage; remove the key, or set pipeline.schedule to "
            '"interleaved", which takes it',
        ),
        ({"chunks_per_stage": 1}, ""),
        (
            {"chunks_per_stage": 1, "schedule": "interleaved"},
            "the schedule interleaved has 2 model chunks a stage or more; write 2 or more, or remove the key",
        ),
        ({"chunks_per_stage": 2, "schedule": "interleaved"}, ""),
        ({"chunks_per_stage": 2, "schedule": "dualpipe-v"}, ""),
        (
            {"chunks_per_stage": 3, "schedule": "zero-bubble-v"},
            "the schedule zero-bubble-v has 2 model chunks a stage; remove the "
            'key, or set pipeline.schedule to "interleaved", which takes it',
        ),
        ({"chunks_per_stage": 9, "schedule": "zb"}, ""),  # another rule's
    ],
)
def test_parts_are_those_of_the_schedule(more: dict[str, Any], words: str) -> None:
    assert said(pipe(2, **more), "DS610") == at("/pipeline/chunks_per_stage", words)
    assert said(pipe(1, **more), "DS610") == []


@pytest.mark.parametrize(
    ("stages", "schedule", "kept"),
    [
        (2, "zero-bubble", "1 micro-batch"),
        (4, "dualpipe-v", "3 micro-batches"),
        (4, "1f1b", ""),
        (1, "zero-bubble", ""),
    ],
)
def test_what_recomputation_would_free_is_kept(stages: int, schedule: str, kept: str) -> None:
    words = (
        f"{schedule} keeps the inputs of linear layers for up to {kept}, which activation checkpointing would free; "
    )
    words += "use the schedule 1f1b if memory runs short"
    config = pipe(stages, schedule=schedule, activation_checkpoint_interval=1)
    assert said(config, "DS609") == at("/pipeline/schedule", words * bool(kept), "info")


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"stages": 2}, "stages"),
        ({"stages": 1}, ""),
        ({"stages": "auto"}, ""),
        ({"stages": 1, "activation_checkpoint_interval": 1}, "activation_checkpoint_interval"),
        ({"activation_checkpoint_interval": 0}, ""),
        ({"schedule": "gpipe", "partition": "uniform"}, "partition"),  # the first alone
    ],
)
def test_a_pipeline_does_nothing_for_another_trainer(more: dict[str, Any], name: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "pipeline": more}
    words = f"pipeline.{name} has no effect: the HuggingFace Trainer has no pipeline; "
    words += "remove the section, or train with the harness"
    assert said(config, "DS607", target="hf") == at(f"/pipeline/{name}", words * bool(name), "warning")
    assert said(config, "DS607") == []
