"""What a run makes of a config: defaults of the harness, arguments, and what DeepSpeed alone would be given."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checking import resolve
from harness.config import AutoValues, Resolved
from harness.config.text.diagnostic import ConfigError
from harness.config.values.pointers import lookup
from harness.device.process_group import require_device
from harness.errors import UserError


def run(config: dict[str, Any], **values: Any) -> Resolved:
    given_names = frozenset(values) - {"world_size", "hidden_size"}
    return resolve({"train_micro_batch_size_per_gpu": 1, **config}, AutoValues(**values, given=given_names))


def sources(found: Resolved) -> dict[str, str]:
    return {item.pointer: item.source for item in found.filled}


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("config", "stage", "dtype"),
    [
        pytest.param({}, 0, None, id="fp32 stays as it is"),
        pytest.param(BF16, 1, "fp32", id="bf16 sums in fp32"),
        pytest.param({**BF16, "zero_optimization": {"stage": 3}}, 3, "fp32", id="at the file's stage"),
        pytest.param({**BF16, "data_types": {"grad_accum_dtype": "bf16"}}, 0, "bf16", id="unless the file says so"),
        pytest.param({**BF16, "data_types": {"grad_accum_dtype": "auto"}}, 1, "fp32", id="auto says nothing"),
        pytest.param(FP16, 1, None, id="fp16 runs at stage 1"),
        pytest.param({**FP16, "zero_optimization": {"stage": 2}}, 2, None, id="or above"),
    ],
)
def test_16_bits_bring_a_stage(config: dict[str, Any], stage: int, dtype: str | None) -> None:
    found = run(config)
    assert found.zero_stage == stage
    assert (lookup(found.config, "/zero_optimization/stage") or 0) == stage
    assert lookup(found.config, "/data_types/grad_accum_dtype") == dtype


@pytest.mark.parametrize(
    ("config", "values", "precision"),
    [
        ({}, {"bf16": True}, "bf16"),
        ({"bf16": None}, {"bf16": True}, "bf16"),
        ({"bf16": {"enabled": "auto"}}, {}, "fp32"),
        ({"bf16": {"enabled": "auto"}}, {"bf16": True}, "bf16"),
        ({"bfloat16": {"enabled": "auto"}}, {"bf16": True}, "bf16"),
        ({"fp16": {"enabled": "auto"}}, {"fp16": True}, "fp16"),
        ({}, {"fp16": False}, "fp32"),
    ],
)
def test_a_switch_of_the_arguments_sets_the_precision(
    config: dict[str, Any], values: dict[str, Any], precision: str
) -> None:
    assert run(config, **values).precision == precision


@pytest.mark.parametrize(
    ("pipeline", "wanted", "interval"),
    [
        ({}, True, 1),
        ({}, False, 0),
        ({"activation_checkpoint_interval": 3}, True, 3),  # which an argument that is on does not change
        ({"activation_checkpoint_interval": 3}, False, 0),
        ({"activation_checkpoint_interval": 3}, None, 3),
    ],
)
def test_gradient_checkpointing_is_an_interval(pipeline: dict[str, Any], wanted: bool | None, interval: int) -> None:
    assert run({"pipeline": pipeline}, gradient_checkpointing=wanted).activation_checkpoint_interval == interval


def test_a_pipeline_is_not_reentrant_unless_the_file_says_so() -> None:
    found = run({"pipeline": {"stages": 2}}, world_size=2)
    assert found.config["pipeline"] == {"stages": 2, "use_reentrant": False}
    asked = run({"pipeline": {"stages": 2, "use_reentrant": True}}, world_size=2)
    assert asked.config["pipeline"]["use_reentrant"] is True
    assert "pipeline" not in run({}).config
    assert run({}, world_size=2, pipeline_parallel_size=2).config["pipeline"]["stages"] == 2


def test_deepspeed_alone_gets_what_it_can_read() -> None:
    tensor = {"autotp_size": 2, "sequence_parallel": True}
    found = run({"tensor_parallel": tensor, "compile": {"enabled": True, "backend": "eager"}}, world_size=4)
    assert found.alone["tensor_parallel"] == {"autotp_size": 2} and found.alone["compile"] == {}
    assert "train_batch_size" not in found.alone  # it would count four ranks as data-parallel
    assert found.config["train_batch_size"] == 2 and "tensor_parallel" not in found.config
    assert (found.sequence_parallel, found.compile_backend) == (True, "eager")
    off = run({"tensor_parallel": tensor}, world_size=4, tensor_parallel_size=1)
    assert off.alone["tensor_parallel"]["autotp_size"] == 0 and off.alone["train_batch_size"] == 4


def test_each_filled_value_says_where_it_is_from() -> None:
    found = run(
        {"optimizer": {"type": "auto"}, "zero_optimization": {"overlap_comm": "auto"}}, optim="sgd", max_grad_norm=2
    )
    said = sources(found)
    assert said["/optimizer/type"] == "--optim" and said["/optimizer/params/lr"] == "default of --learning_rate"
    assert said["/gradient_clipping"] == "--max_grad_norm"
    assert said["/zero_optimization/overlap_comm"] == "left out: DeepSpeed's default"
    assert said["/train_batch_size"] == "micro-batch x accumulation x data parallel"
    assert "/train_micro_batch_size_per_gpu" not in said  # it stood in the file


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_an_adamw_that_the_file_does_not_name_is_the_harness_s_own(optim: str) -> None:
    assert "optimizer" not in run({}, optim=optim).config
    assert run({"optimizer": {"type": "auto"}}, optim=optim).config["optimizer"]["type"] == "AdamW"


def test_what_auto_brings_is_checked_too() -> None:
    config = {"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": "auto"}
    with pytest.raises(ConfigError, match=r"compute_grad_norm is false and gradients are clipped at 1\.0"):
        run(config)
    assert run(config, max_grad_norm=0.0).config["gradient_clipping"] == 0.0


def test_a_misspelt_key_is_refused_unless_it_is_allowed() -> None:
    config = {"train_batch_size": 8, "zero_optimisation": {"stage": 3}}
    with pytest.raises(ConfigError, match="did you mean zero_optimization"):
        resolve(config, AutoValues())
    assert resolve(config, AutoValues(), allow_ignored_keys=True).zero_stage == 0


def test_on_a_cpu_what_was_advice_is_an_error() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(UserError) as refused:
        require_device({"train_batch_size": 8, "optimizer": {"type": "Lamb"}}, cpu)
    assert str(refused.value) == (
        "DS109 optimizer.type Lamb: DeepSpeed supports it on accelerators only, not on a CPU; "
        "run on an accelerator, or remove it"
    )
    require_device({"train_batch_size": 8}, cpu)


CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "bf16": st.sampled_from([{"enabled": True}, {"enabled": "auto"}, {}]),
        "zero_optimization": st.sampled_from([{"stage": 1}, {"stage": "2", "overlap_comm": "auto"}, True, {}]),
        "gradient_clipping": st.sampled_from([0.5, "auto", 0]),
        "optimizer": st.sampled_from([{"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}, {"type": "auto"}]),
        "scheduler": st.just({"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_min_lr": "auto"}}),
        "pipeline": st.sampled_from([{"stages": 1}, {"stages": "auto", "partition": "best"}]),
        "gradient_accumulation_steps": st.sampled_from([1, 2, "auto"]),
    },
)


@settings(max_examples=40)
@given(CONFIGS, st.sampled_from([1, 2, 4]))
def test_a_resolved_config_has_nothing_left_to_fill(config: dict[str, Any], world_size: int) -> None:
    values = AutoValues(world_size=world_size)
    once = resolve({"train_micro_batch_size_per_gpu": 1, **config}, values)
    assert "auto" not in json.dumps(once.config)
    again = resolve(once.config, values)
    assert again.config == once.config and again.filled == ()
    assert (again.zero_stage, again.precision, again.train_batch) == (once.zero_stage, once.precision, once.train_batch)
