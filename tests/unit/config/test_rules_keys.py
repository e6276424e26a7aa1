"""The rules about names and values: misspelt, misplaced, removed, deprecated keys, and what the harness refuses."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checking.schema import version_warning
from harness.checking.schema.suggest import alias_here, elsewhere
from harness.spelling import nearest, plain
from tests.unit.config.said import said


def at(pointer: str, words: str, severity: str = "error") -> list[str]:
    return [f"{severity} {pointer}: {words}"] if words else []


@pytest.mark.parametrize(
    ("config", "pointer", "words"),
    [
        pytest.param(
            {"gradient_cliping": 1},
            "/gradient_cliping",
            "unknown key gradient_cliping; did you mean gradient_clipping?",
            id="a letter",
        ),
        pytest.param(
            {"Zero-Optimisation": {}},
            "/Zero-Optimisation",
            "unknown key Zero-Optimisation; did you mean zero_optimization?",
            id="case, dash, spelling",
        ),
        pytest.param(
            {"gradient_cliping": 1, "gradient_clipping": 1},
            "/gradient_cliping",
            "unknown key gradient_cliping; gradient_clipping is set as well; keep one of them",
            id="beside the right one",
        ),
        pytest.param(
            {"zero_optimizatio": 3},
            "/zero_optimizatio",
            "unknown key zero_optimizatio; did you mean zero_optimization?",
            id="a number for a section",
        ),
        pytest.param({"gradient_cliping": {"a": 1}}, "", "", id="an object is meant as something else"),
        pytest.param({"_gradient_cliping": 1}, "", "", id="a comment"),
        pytest.param({"comment on gradient_clipping": 1}, "", "", id="another comment"),
    ],
)
def test_a_misspelt_key_is_told(config: dict[str, Any], pointer: str, words: str) -> None:
    assert said(config, "DS101") == at(pointer, words, "warning")


def test_where_deepspeed_checks_a_section_an_unknown_key_is_an_error() -> None:
    assert said({"fp16": {"enabld": True}}, "DS101")[0].startswith(
        "error /fp16/enabld: unknown key fp16.enabld; did you"
    )
    assert said({"fp16": {"enabld": "auto"}}, "DS101")[0].startswith("warning")  # every "auto" there is dropped
    assert said({"fp16": {"frobnicate": 1}}, "DS103") == [
        "error /fp16/frobnicate: unknown key fp16.frobnicate; remove it"
    ]
    assert said({"fp16": {"_frobnicate": 1}}, "DS103")[0].startswith("error")  # even where it is meant as a comment
    assert said({"optimizer": {"params": {"frobnicate": 1}}}, "DS103") == []  # they are the optimizer's


@pytest.mark.parametrize(
    ("config", "pointer", "words"),
    [
        pytest.param(
            {"pipeline": {"partition_activations": True}},
            "/pipeline/partition_activations",
            "partition_activations does not belong in pipeline but in activation_checkpointing; "
            "move it to activation_checkpointing.partition_activations",
            id="another section",
        ),
        pytest.param(
            {"pipeline": {"partition_activations": 1}, "activation_checkpointing": {"partition_activations": True}},
            "/pipeline/partition_activations",
            "partition_activations does not belong in pipeline but in activation_checkpointing; "
            "it belongs at activation_checkpointing.partition_activations, which is set as well; keep one of them",
            id="set there as well",
        ),
        pytest.param(
            {"pipeline": {"gradient_clipping": 1.0}},
            "/pipeline/gradient_clipping",
            "gradient_clipping does not belong in pipeline; move it to gradient_clipping",
            id="the top level",
        ),
        pytest.param(
            {"pipeline": {"fp16": True}},
            "/pipeline/fp16",
            "fp16 does not belong in pipeline; remove it: fp16 is a separate section",
            id="a switch for a section",
        ),
    ],
)
def test_a_misplaced_key_is_told_with_its_place(config: dict[str, Any], pointer: str, words: str) -> None:
    found = said(config, "DS102") or said(config, "DS101")
    assert found == at(pointer, words, "warning")


def test_a_feature_that_is_gone_is_refused_even_when_it_is_off() -> None:
    (off,) = said({"elasticity": {"enabled": False}}, "DS104")
    (on,) = said({"elasticity": {"enabled": True}}, "DS104")
    assert off.startswith("error /elasticity: ") and on.startswith("error /elasticity: ")
    assert said({"elasticity": {"enabled": False}}, "DS103") == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(
            {"zero_optimization": True},
            '/zero_optimization: zero_optimization as true or false is deprecated; write {"stage": 1}',
            id="a switch",
        ),
        pytest.param(
            {"zero_optimization": False},
            '/zero_optimization: zero_optimization as true or false is deprecated; write {"stage": 0}',
            id="off",
        ),
        pytest.param({"bfloat16": {"enabled": True}}, "/bfloat16: bfloat16 is deprecated; use bf16", id="an old name"),
        pytest.param(
            {"bfloat16": {"enabled": True}, "bf16": {}},
            "/bfloat16: bfloat16 is deprecated; remove it",
            id="beside the new one",
        ),
        pytest.param(
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            "/zero_optimization/cpu_offload: zero_optimization.cpu_offload is deprecated; use offload_optimizer",
            id="a switch of a section",
        ),
        pytest.param({"zero_optimization": {"stage": 2, "cpu_offload": "auto"}}, "", id="auto is dropped"),
    ],
)
def test_a_deprecated_form_is_told_with_the_new_one(config: dict[str, Any], words: str) -> None:
    assert said(config, "DS105") == ([f"warning {words}"] if words else [])


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (
            {"cpu_offload": False, "offload_optimizer": {}},
            "cpu_offload: cpu_offload and offload_optimizer cannot both be set; remove cpu_offload",
        ),
        ({"cpu_offload": False, "offload_optimizer": "auto"}, ""),
        ({"cpu_offload": "auto", "offload_optimizer": {}}, ""),
        (
            {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1},
            "prefetch_bucket_size: prefetch_bucket_size and "
            "stage3_prefetch_bucket_size are two names for the same key; remove prefetch_bucket_size",
        ),
        ({"prefetch_bucket_size": 1}, ""),
    ],
)
def test_two_forms_of_one_setting_are_refused(zero: dict[str, Any], words: str) -> None:
    found = said({"zero_optimization": {"stage": 3, **zero}}, "DS106")
    assert found == at(f"/zero_optimization/{words.split(':')[0]}", words.partition(": ")[2])


IDLE = "warning {0}: {1} has no effect in the harness: {2}; remove it"


@pytest.mark.parametrize(
    ("config", "pointer", "why"),
    [
        (
            {"dataloader_drop_last": True},
            "/dataloader_drop_last",
            "the harness reads the data itself, in an order that depends on the seed",
        ),
        ({"dataloader_drop_last": False}, "", ""),
        ({"dataloader_drop_last": "auto"}, "", ""),
        (
            {"hybrid_engine": {"enabled": True}},
            "/hybrid_engine/enabled",
            "the harness does not generate text during training",
        ),
        ({"hybrid_engine": {"enabled": False}}, "", ""),
        (
            {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}},
            "/data_efficiency/enabled",
            "the harness reads the data itself, in an order that depends on the seed",
        ),
    ],
)
def test_what_has_nothing_to_act_on_is_told_once(config: dict[str, Any], pointer: str, why: str) -> None:
    wanted = [IDLE.format(pointer, pointer.strip("/").replace("/", "."), why)] if pointer else []
    assert said(config, "DS107") == wanted
    assert said(config, "DS107", target="deepspeed") == []


ZERO3 = {"stage": 3}


@pytest.mark.parametrize(
    ("config", "pointer"),
    [
        ({"managed_gradient_accumulation": False}, "/managed_gradient_accumulation"),
        ({"managed_gradient_accumulation": True}, ""),
        (
            {"zero_optimization": {**ZERO3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}},
            "/zero_optimization/offload_param/device",
        ),
        ({"zero_optimization": {**ZERO3, "offload_param": {"device": "cpu"}}}, ""),
        (
            {"zero_optimization": {**ZERO3, "offload_optimizer": {"device": "cpu", "ratio": 0.99}}},
            "/zero_optimization/offload_optimizer/ratio",
        ),
        ({"zero_optimization": {**ZERO3, "offload_optimizer": {"device": "cpu", "ratio": 1}}}, ""),
        ({"zero_optimization": {**ZERO3, "stage3_module_granularity_threshold": 0}}, ""),
        (
            {"zero_optimization": {**ZERO3, "stage3_module_granularity_threshold": 1}},
            "/zero_optimization/stage3_module_granularity_threshold",
        ),
        (
            {"zero_optimization": {**ZERO3, "zero_quantized_gradients": True}, "tensor_parallel": {"autotp_size": 2}},
            "/zero_optimization/zero_quantized_gradients",
        ),
        ({"zero_optimization": {**ZERO3, "zero_quantized_gradients": True}}, ""),
        ({"zero_optimization": ZERO3, "compile": {"enabled": True}}, "/compile/enabled"),
        ({"zero_optimization": {"stage": 2}, "compile": {"enabled": True}}, ""),
        ({"torch_autocast": {"enabled": True, "dtype": "half"}}, "/torch_autocast/dtype"),
        ({"torch_autocast": {"enabled": False, "dtype": "half"}}, ""),
        (
            {
                "tensor_parallel": {"autotp_size": 2, "sequence_parallel": True},
                "activation_checkpointing": {"partition_activations": True},
            },
            "/activation_checkpointing/partition_activations",
        ),
    ],
)
def test_what_the_harness_refuses(config: dict[str, Any], pointer: str) -> None:
    found = said(config, "DS108")
    assert [line.split(": ")[0] for line in found] == ([f"error {pointer}"] if pointer else [])
    assert said(config, "DS108", target="hf") == []


EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


@pytest.mark.parametrize(
    ("pointer", "config"),
    [
        ("/zero_optimization/stage", {"zero_optimization": {"stage": 3}}),
        ("/zero_optimization/reduce_scatter", {"zero_optimization": {"stage": 1, "reduce_scatter": False}}),
        ("/zero_optimization/contiguous_gradients", {"zero_optimization": {"stage": 2, "contiguous_gradients": False}}),
        ("/fp16/enabled", {"fp16": {"enabled": True}}),
        ("/tiling/feed_forward", {"tiling": {"feed_forward": 16}}),
    ],
)
def test_what_experts_on_other_data_ranks_exclude_is_refused(pointer, config):
    base = {"train_micro_batch_size_per_gpu": 1, **config}
    (found,) = said({**base, **EXPERTS}, "DS108", world_size=2)
    assert pointer in str(found)
    assert said({**base, **EXPERTS, "tensor_parallel": {"autotp_size": 2}}, "DS108", world_size=2) == []
    assert said(base, "DS108", world_size=2) == []


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"route_scale": 2.0}, "expert_parallel.route_scale would change what the model computes"),
        ({"top_k": 4}, "expert_parallel.top_k would change what the model computes"),
        ({"score_func": "sigmoid"}, "expert_parallel.score_func would change what the model computes"),
        ({"expert_tensor_parallel_size": 2}, "would split experts that are distributed whole"),
        ({"top_k": "auto", "route_scale": 1.0, "expert_tensor_parallel_size": 1, "load_balance_coeff": None}, ""),
        ({"route_scale": 2.0, "enabled": False}, ""),
    ],
)
def test_options_that_would_change_what_a_mixture_computes_are_refused(option, why):
    config = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {**EXPERTS["expert_parallel"], **option}}
    found = said(config, "DS108")
    assert len(found) == bool(why) and why in "".join(found)
    assert said(config, "DS313") == []
    assert said(config, "DS108", target="deepspeed") == []


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"optimizer": {"type": "LAMB"}}, "optimizer.type LAMB"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type Lion"),
        (
            {"optimizer": {"type": "Lion"}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights",
        ),
        ({"aio": {"use_gds": False}}, ""),
    ],
)
def test_what_needs_an_accelerator_is_advice(config: dict[str, Any], shown: str) -> None:
    words = f"{shown}: DeepSpeed supports it on accelerators only, not on a CPU; run on an accelerator, or remove it"
    assert [line.partition(": ")[2] for line in said(config, "DS109")] == ([words] if shown else [])


@pytest.mark.parametrize(
    ("name", "candidates", "meant"),
    [
        ("stge", ["stage", "state"], "stage"),
        ("Stage", ["stage"], "stage"),
        ("lr_scheduler", ["scheduler"], "scheduler"),
        ("lr_schedule_type", ["scheduler"], None),
        ("x", [], None),
        ("", ["stage"], None),
        ("zero optimisation", ["zero_optimization"], "zero_optimization"),
    ],
)
def test_the_nearest_name_is_near_enough(name: str, candidates: list[str], meant: str | None) -> None:
    assert nearest(name, candidates) == meant


def test_a_name_that_many_sections_have_says_nothing_about_its_place() -> None:
    assert elsewhere("enabled", "/pipeline", True) is None and elsewhere("device", "", "cpu") is None
    assert elsewhere("loss_scale", "/bf16", 0) == "/fp16/loss_scale"
    assert elsewhere("loss_scale", "/fp16", 0) is None  # it is there
    assert alias_here("frobnicate", "") is None
    assert plain("Zero-Optimisation of all") == "zero_optimization_of_all"


@pytest.mark.parametrize(
    ("installed", "is_warned"),
    [("0.19.8", False), ("0.19.8+cpu", False), ("0.19.99", False), ("0.20.0", True), ("0.18.9", True), ("1.0", True)],
)
def test_versions_are_compared_as_numbers(installed: str, is_warned: bool) -> None:
    warning = version_warning(installed)
    assert (warning is not None) == is_warned and (not is_warned or warning.endswith(f"but {installed} is installed"))
