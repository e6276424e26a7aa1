"""The borders of the rules about precision: which switches exclude each other, at which ZeRO stage, in which words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.said import said

ON, ADAMW = {"enabled": True}, {"optimizer": {"type": "AdamW"}}


def zero(stage: int, **more: object) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


BOTH = (
    "error /fp16/enabled: fp16 and bf16 are both enabled; keep bf16 if the device supports it: it needs no loss scaling"
)


@pytest.mark.parametrize(
    ("config", "is_said"),
    [
        pytest.param({"fp16": ON, "bf16": ON}, True, id="both"),
        pytest.param({"fp16": {"enabled": "yes"}, "bf16": {"enabled": 1}}, True, id="as deepspeed reads them"),
        pytest.param({"fp16": ON, "bfloat16": ON}, True, id="by the old name"),
        pytest.param({"fp16": ON, "bfloat16": ON, "bf16": {"enabled": False}}, False, id="the old name is not read"),
        pytest.param({"fp16": ON, "bf16": {"enabled": "auto"}}, False, id="one is left open"),
        pytest.param({"fp16": ON, "bf16": {}}, False, id="an empty section is off"),
    ],
)
def test_a_model_has_one_precision(config: dict[str, Any], is_said: bool) -> None:
    assert said({**zero(1), **config}, "DS401") == [BOTH] * is_said


@pytest.mark.parametrize(
    ("section", "value", "times"),
    [("bf16", 0, 1), ("bf16", "auto", 0), ("bf16", None, 0), ("bfloat16", 128, 1), ("fp16", 0, 0)],
)
def test_bf16_has_no_loss_scale(section: str, value: object, times: int) -> None:
    found = said({section: {"enabled": True, "loss_scale": value}}, "DS402")
    assert found == [f"error /{section}/loss_scale: bf16 has no loss scale; remove it"] * times


WHOLE, ADAPTIVE = "use a whole number of at least 1", "use 0 for an adaptive loss scale"


@pytest.mark.parametrize(
    ("fp16", "words"),
    [
        pytest.param({"min_loss_scale": 0}, f"min_loss_scale: fp16.min_loss_scale is 0; {WHOLE}", id="a floor of 0"),
        pytest.param({"min_loss_scale": 1}, "", id="a floor of 1"),
        pytest.param({"loss_scale_window": -5}, f"loss_scale_window: fp16.loss_scale_window is -5; {WHOLE}"),
        pytest.param({"loss_scale_window": "0"}, f"loss_scale_window: fp16.loss_scale_window is 0; {WHOLE}"),
        pytest.param({"min_loss_scale": 0, "loss_scale": 128}, "", id="a fixed scale uses neither"),
        pytest.param({"min_loss_scale": 0, "loss_scale": "0"}, f"min_loss_scale: fp16.min_loss_scale is 0; {WHOLE}"),
        pytest.param({"min_loss_scale": 0, "enabled": False}, "", id="fp16 is off"),
        pytest.param({"min_loss_scale": "auto"}, "", id="auto"),
        pytest.param({"loss_scale": True}, f"loss_scale: fp16.loss_scale is true; {ADAPTIVE}", id="a switch"),
        pytest.param({"loss_scale": False, "enabled": False}, f"loss_scale: fp16.loss_scale is false; {ADAPTIVE}"),
    ],
)
def test_adaptive_loss_scaling_has_a_window_and_a_floor(fp16: dict[str, Any], words: str) -> None:
    assert said({"fp16": {"enabled": True, **fp16}}, "DS403") == ([f"error /fp16/{words}"] if words else [])


MASTERS, STATES = "bf16_master_weights_and_grads", "bf16_optimizer_states"
STAGE, CPU = "set zero_optimization.stage to 1, 2 or 3", {"offload_optimizer": {"device": "cpu"}}
NAMED = 'set offload_optimizer.device to "cpu" and optimizer.type to "AdamW", or remove it'


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param({"bf16": {MASTERS: True}}, [f"bf16/{MASTERS}: {MASTERS} needs ZeRO, but the stage is 0; {STAGE}"]),
        pytest.param(
            {"bf16": {MASTERS: True, STATES: True}},
            [f"bf16/{name}: {name} needs ZeRO, but the stage is 0; {STAGE}" for name in (MASTERS, STATES)],
            id="both at stage 0",
        ),
        pytest.param({"bf16": {MASTERS: True, STATES: True}, **zero(1)}, [], id="both at stage 1"),
        pytest.param(
            {"bf16": {MASTERS: True}, **zero(1)},
            [f"bf16/{MASTERS}: {MASTERS} needs offload_optimizer and DeepSpeed's CPU Adam; {NAMED}"],
            id="master weights alone",
        ),
        pytest.param({"bf16": {MASTERS: True}, **ADAMW, **zero(2, **CPU)}, [], id="master weights, offloaded"),
        *(
            pytest.param(
                {"bf16": {MASTERS: True, **states}, **zero(2, **CPU), **optimizer},
                [f"bf16/{MASTERS}: {MASTERS} needs DeepSpeed's CPU Adam with offload_optimizer; {remedy}{otherwise}"],
                id=f"{remedy}, {'states too' if states else 'master weights alone'}",
            )
            for optimizer, remedy in (
                ({}, 'set optimizer.type to "AdamW"'),
                ({"optimizer": {"type": "SGD"}}, 'set optimizer.type to "AdamW"'),
                ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, "remove torch_adam"),
            )
            for states, otherwise in (({}, ", or remove it"), ({STATES: True}, ""))
        ),
        pytest.param(
            {"bf16": {MASTERS: True}, "optimizer": {"type": "auto"}, **zero(2, **CPU)}, [], id="--optim decides"
        ),
        pytest.param(
            {"bf16": {STATES: True}, **zero(3)},
            [f"bf16/{STATES}: {STATES} needs {MASTERS}; enable {MASTERS} too"],
            id="states without master weights",
        ),
        pytest.param(
            {"fp16": {"fp16_master_weights_and_grads": True}, **zero(2)},
            [
                f"fp16/fp16_master_weights_and_grads: fp16_master_weights_and_grads needs offload_optimizer and "
                f"DeepSpeed's CPU Adam; {NAMED}"
            ],
            id="of fp16",
        ),
        pytest.param(
            {"bfloat16": {MASTERS: True}},
            [f"bfloat16/{MASTERS}: {MASTERS} needs ZeRO, but the stage is 0; {STAGE}"],
            id="by the old name",
        ),
    ],
)
def test_master_weights_in_16_bits_need_zero(config: dict[str, Any], words: list[str]) -> None:
    assert said(config, "DS404") == [f"error /{each}" for each in words]


@pytest.mark.parametrize(
    ("zenflow", "optimizer", "remedy"),
    [({}, ADAMW, "remove zenflow, or remove it"), (None, ADAMW, ""), (None, {}, "")],  # a program may bring its own
)
def test_without_the_harness_master_weights_in_16_bits_exclude_zenflow(
    zenflow: dict[str, Any] | None, optimizer: dict[str, Any], remedy: str
) -> None:
    config = {"bf16": {MASTERS: True}, **zero(2, **CPU, zenflow=zenflow), **optimizer}
    assert [item.split("; ")[1] for item in said(config, "DS404", target="deepspeed")] == ([remedy] if remedy else [])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param({"bf16": ON}, ("fp32", "bf16"), id="bf16"),
        pytest.param({"bf16": ON, "name": "torch.bfloat16"}, None, id="by torch's name"),
        pytest.param({"bf16": ON, "name": "half"}, ("fp16", "bf16"), id="by another name"),
        pytest.param({}, None, id="none is fp32"),
        pytest.param({"name": "bf16"}, ("bf16", "fp32"), id="none is not bf16"),
        pytest.param({"bf16": {"enabled": "auto"}}, None, id="left open"),
        pytest.param({"bf16": ON, "name": "float8"}, None, id="an unknown name is another rule's"),
    ],
)
def test_the_type_of_parameters_is_the_precision(config: dict[str, Any], words: tuple[str, str] | None) -> None:
    name = config.get("name", "fp32")
    rest = {key: value for key, value in config.items() if key != "name"}
    found = said({"data_types": {"param_dtype": name}, **rest}, "DS405")
    message = "param_dtype is {}, but the model's precision is {}; write {}, or remove it"
    wanted = [f"error /data_types/param_dtype: {message.format(*words, words[1])}"] if words else []
    assert found == wanted


@pytest.mark.parametrize(
    ("dtype", "stage", "words"),
    [
        ("fp32", 0, "gradients in fp32 for a model in bf16 need ZeRO; set zero_optimization.stage to 1, or remove it"),
        ("fp32", 1, ""),
        ("bf16", 0, ""),
        ("auto", 0, ""),
        (None, 0, ""),
    ],
)
def test_gradients_of_another_type_need_zero(dtype: str | None, stage: int, words: str) -> None:
    config = {"bf16": ON, "data_types": {"grad_accum_dtype": dtype}, **zero(stage)}
    assert said(config, "DS406") == ([f"error /data_types/grad_accum_dtype: {words}"] if words else [])


LAMB = {"optimizer": {"type": "Lamb"}}
INSTEAD = "warning /fp16/enabled: fp16 at ZeRO stage 0: the harness uses stage 1 instead; "
UNTESTED = "error /fp16/enabled: fp16 at ZeRO stage 0: ZeRO is not tested with {0}; "
TO_1, UNTESTED_TO_1 = "set zero_optimization.stage to 1", "set zero_optimization.stage to 1 and {} to true"


@pytest.mark.parametrize(
    ("config", "target", "words"),
    [
        pytest.param({}, "harness", [INSTEAD + TO_1], id="without an optimizer"),
        pytest.param(ADAMW, "harness", [INSTEAD + TO_1], id="with one that was tested"),
        pytest.param(
            LAMB, "harness", [UNTESTED.format("Lamb") + UNTESTED_TO_1.format("zero_allow_untested_optimizer")]
        ),
        pytest.param({**LAMB, "zero_allow_untested_optimizer": True}, "harness", [INSTEAD + TO_1], id="allowed"),
        pytest.param({"optimizer": {"type": "Lumb"}}, "harness", [INSTEAD + TO_1], id="unknown: another rule's"),
        pytest.param(zero(1), "harness", [], id="at stage 1"),
        pytest.param({"zero_optimization": True}, "harness", [], id="as a switch"),
        pytest.param({}, "deepspeed", [], id="without the harness"),
    ],
)
def test_fp16_runs_at_stage_1(config: dict[str, Any], target: str, words: list[str]) -> None:
    assert said({"fp16": ON, **config}, "DS407", target=target) == words
