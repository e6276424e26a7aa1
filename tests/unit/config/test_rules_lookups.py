"""What DeepSpeed imports, looks up or hands on by name is resolved as it does; each case was run through DeepSpeed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from harness.config.values.pointers import put
from tests.unit.config.said import said

ADAM: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
CPU = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def schedule(kind: str, config: dict[str, Any] | None = None, **params: object) -> dict[str, Any]:
    return {**ADAM, "scheduler": {"type": kind, "params": params}, **(config or {})}


@pytest.mark.parametrize("kind", ["CosineAnnealingLR", "LinearLR", "OneCycleLR"])
@pytest.mark.parametrize(
    ("config", "wrapper"),
    [
        ({"zero_optimization": {"stage": 1}}, "ZeRO stage 1"),
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({}, ""),
    ],
)
def test_a_schedule_of_torch_needs_an_optimizer_of_torch(kind: str, config: dict[str, Any], wrapper: str) -> None:
    found = said(schedule(kind, config), "DS816")
    assert [f"an optimizer that {wrapper} wraps" in item for item in found] == ([True] if wrapper else [])


def test_a_schedule_of_torch_is_advised_only_where_it_works() -> None:
    zero = {"zero_optimization": {"stage": 2}}
    assert "CosineAnnealingLR" in said(schedule("CosineAnealingLR"), "DS811")[0]
    assert "torch" not in said(schedule("Linear", zero), "DS811")[0]
    assert "a class of torch.optim.lr_scheduler" in said(schedule("nothing like it"), "DS811")[0]


@pytest.mark.parametrize(
    ("kind", "params", "is_said"),
    [
        ("WarmupLR", {"warmup_max_lr": 1e-3}, True),
        ("WarmupLR", {"warmup_max_lr": 1e-4}, False),
        ("WarmupLR", {}, False),  # takes the optimizer's
        ("WarmupLR", {"warmup_max_lr": None}, False),
        ("WarmupLR", {"warmup_max_lr": "auto"}, False),
        ("WarmupDecayLR", {"total_num_steps": 9}, True),  # its default is 0.001
        ("WarmupCosineLR", {"total_num_steps": 9}, False),  # scales the optimizer's
        ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}, True),
        ("LRRangeTest", {"lr_range_test_min_lr": 1e-4}, False),
        ("StepLR", {"step_size": 9}, False),
    ],
)
def test_the_schedule_sets_the_rate_that_the_optimizer_names(kind: str, params: dict[str, Any], is_said: bool) -> None:
    assert bool(said(schedule(kind, **params), "DS818")) is is_said


@pytest.mark.parametrize("target", ["harness", "hf", "deepspeed"])
def test_what_muon_drops_is_said_for_every_target(target: str) -> None:
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.1, "ns_steps": 3, "nesterov": False}}}
    severity = "error" if target == "harness" else "warning"
    assert [item.split(":")[0] for item in said(muon, "DS803", target=target)] == [
        f"{severity} /optimizer/params/ns_steps",
        f"{severity} /optimizer/params/nesterov",
    ]


@pytest.mark.parametrize(
    ("zero", "code"),
    [
        ({"stage": 2}, "DS513"),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, "DS513"),
        ({**CPU, "stage": 0}, "DS513"),
        (CPU, ""),
    ],
)
def test_zenflow_needs_zero_and_offload(zero: dict[str, Any], code: str) -> None:
    config = {**ADAM, "zero_optimization": {**zero, "zenflow": {}}}
    assert bool(said(config, "DS513", target="deepspeed")) is bool(code)


@pytest.mark.parametrize(
    ("zenflow", "code"),
    [
        ({"select_strategy": "step"}, "DS209"),
        ({"select_strategy": "epoch", "select_interval": "auto"}, "DS209"),
        ({"select_interval": 2}, "DS209"),
        ({"select_strategy": "auto", "select_interval": 2}, "DS209"),
        ({"select_strategy": "step", "select_interval": 2, "update_interval": 4}, "DS514"),
        ({"select_strategy": "step", "select_interval": 4, "update_interval": 4}, ""),
        ({"select_strategy": "epoch", "select_interval": 1, "update_interval": 4}, ""),
        ({"select_strategy": "step", "select_interval": 4}, ""),
        ({}, ""),
    ],
)
def test_zenflows_intervals_fit_each_other(zenflow: dict[str, Any], code: str) -> None:
    config = {**ADAM, "zero_optimization": {**CPU, "zenflow": zenflow}}
    assert [each for each in ("DS209", "DS514") if said(config, each, target="deepspeed")] == ([code] if code else [])


@pytest.mark.parametrize(
    ("optimizer", "where"),
    [
        ({"type": "SGD"}, "/optimizer/type"),
        ({"type": "AdamW", "params": {"bias_correction": True}}, "/optimizer/params/bias_correction"),
        ({"type": "AdamW", "params": {"eps": 1e-8}}, ""),
        (None, "/zero_optimization/zenflow"),
    ],
)
def test_zenflow_hands_the_optimizers_parameters_on(optimizer: dict[str, Any] | None, where: str) -> None:
    named = {"optimizer": optimizer} if optimizer is not None else {}
    found = said({**named, "zero_optimization": {**CPU, "zenflow": {}}}, "DS515", target="deepspeed")
    assert [item.split(":")[0] for item in found] == ([f"error {where}"] if where else [])


LTD: dict[str, Any] = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_schedule": {
        "min_value": 16,
        "max_value": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 8},
    },
}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("", {"enabled": True}, "random_ltd needs total_layer_num, random_ltd_layer_num and random_ltd_schedule"),
        ("random_ltd_schedule", {}, "needs min_value, max_value, schedule_type and schedule_config"),
        ("random_ltd_schedule/schedule_config", {"require_steps": 1}, "schedule_config needs seq_per_step"),
        ("random_ltd_schedule/schedule_type", "cosine", 'is "cosine", not "fixed_linear"'),
        ("random_ltd_schedule/schedule_config/seq_per_step", 0, "is 0, but must be above 0"),
        ("layer_token_lr_schedule", {"enabled": True}, "is true, not false: DeepSpeed does not implement it"),
        ("total_layer_num", 4, ""),
        ("enabled", False, ""),
    ],
)
def test_random_ltd_has_what_deepspeed_looks_up(path: str, value: object, message: str) -> None:
    data: dict[str, Any] = {"random_ltd": copy.deepcopy(LTD)}
    put(data, "/random_ltd" + (f"/{path}" if path else ""), value)
    found = said({"data_efficiency": {"data_routing": data}}, "DS209", target="deepspeed")
    assert [message in item for item in found] == ([True] if message else [])


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"gradient_clipping": "1.0"}, "DS201"),
        ({"steps_per_print": "10"}, "DS201"),
        ({"log_level": "loud"}, "DS202"),
        ({"data_types": {"grad_accum_dtype": "half16"}}, "DS202"),
        ({"data_types": {"grad_accum_dtype": "int8"}, "zero_optimization": {"stage": 1}}, "DS406"),
        ({"data_types": {"buffer_dtype": "x"}, "bf16": {"enabled": True}}, "DS202"),
        ({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Liner"]}}, "DS408"),
        ({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn."]}}, "DS408"),
        ({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["mine.Layer"]}}, ""),
        ({"torch_autocast": {"enabled": False, "lower_precision_safe_modules": ["Linear"]}}, ""),
        ({"data_types": {"buffer_dtype": "x"}}, ""),  # nothing reads it in fp32
    ],
)
def test_a_name_that_deepspeed_cannot_resolve_is_an_error(config: dict[str, Any], code: str) -> None:
    codes = ("DS201", "DS202", "DS406", "DS408")
    found = {each for each in codes for item in said(config, each, target="deepspeed") if item.startswith("error")}
    assert found == ({code} if code else set())


@pytest.mark.parametrize(
    ("target", "tp_size", "is_said"),
    [("deepspeed", 2, True), ("hf", 2, True), ("deepspeed", 1, False), ("harness", 2, False)],
)
def test_deepspeed_counts_tensor_parallel_ranks_in_a_batch(target: str, tp_size: int, is_said: bool) -> None:
    config = {"train_batch_size": 8, "tensor_parallel": {"autotp_size": tp_size}}
    assert bool(said(config, "DS306", target=target)) is is_said


@pytest.mark.parametrize(
    ("target", "tp_size", "is_said"), [("hf", 2, False), ("hf", 1, True), ("deepspeed", 2, False), ("harness", 2, True)]
)
def test_what_saves_a_model_under_autotp_is_never_removed(target: str, tp_size: int, is_said: bool) -> None:
    config = {
        "zero_optimization": {"stage": 1, "stage3_gather_16bit_weights_on_model_save": True},
        "tensor_parallel": {"autotp_size": tp_size},
    }
    assert bool(said(config, "DS503", target=target)) is is_said


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"tensorboard": {"enabled": True, "output_path": "/data/tb"}}, "warning /tensorboard/output_path"),
        ({"tensorboard": {"enabled": True, "output_path": "logs", "job_name": "/x"}}, "warning /tensorboard/job_name"),
        (
            {"csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "../../x"}},
            "error /csv_monitor/job_name",
        ),
        ({"csv_monitor": {"enabled": True, "output_path": "../logs"}}, "error /csv_monitor/output_path"),
        ({"csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "../x"}}, ""),
        ({"tensorboard": {"enabled": False, "output_path": "/data/tb"}}, ""),
        ({"flops_profiler": {"output_file": "/tmp/profile"}}, "warning /flops_profiler/output_file"),
        ({"tensorboard": {"enabled": True}}, ""),
    ],
)
def test_a_run_writes_only_below_its_folder(config: dict[str, Any], where: str) -> None:
    assert [item.split(":")[0] for item in said(config, "DS111")] == ([where] if where else [])
    assert not said(config, "DS111", target="deepspeed")


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"compile": {"passes": ["z1"]}}, "/compile/passes"),
        ({"tensor_parallel": {"preset_model": "llama"}}, "/tensor_parallel/preset_model"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"pin_memory": False}}},
         "/zero_optimization/offload_optimizer/pin_memory"),
        ({"tensorboard": {"output_path": "tb"}}, "/tensorboard/output_path"),
        ({"hybrid_engine": {"max_out_tokens": 9}}, "/hybrid_engine/max_out_tokens"),
        ({"tensor_parallel": {"autotp_size": 0, "preset_model": "llama"}}, ""),  # off on purpose
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "pin_memory": False}}}, ""),
    ],
)  # fmt: skip
def test_a_switch_need_not_be_called_enabled(config: dict[str, Any], where: str) -> None:
    found = said(config, "DS110", target="deepspeed")
    assert [item.split(":")[0] for item in found] == ([f"warning {where}"] if where else [])


def test_an_object_is_not_sent_to_a_switch_of_the_same_name() -> None:
    assert not said({"sequence_parallel": {"size": 4}}, "DS102")
    assert said({"sequence_parallel": {"size": 4}}, "DS103")


@pytest.mark.parametrize(
    ("config", "is_said"),
    [
        ({"zero_optimization": {"stage": 2}}, True),
        ({"zero_optimization": {"stage": 2}, "gradient_allreduce_op": "Sum"}, False),
        ({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "Sum"}, True),  # beside another error
    ],
)
def test_scaled_gradients_are_refused_where_deepspeed_divides_them(config: dict[str, Any], is_said: bool) -> None:
    assert bool(said({**config, "gradient_predivide_factor": 2.0}, "DS507")) is is_said


AUTOEP: dict[str, Any] = {"enabled": True, "preset_model": "mixtral"}


@pytest.mark.parametrize(
    ("section", "code"),
    [
        ({**AUTOEP, "preset_model": "mixtrall"}, "DS202"),
        ({**AUTOEP, "expert_activation": "relu"}, "DS202"),
        ({**AUTOEP, "score_apply": "x"}, "DS202"),
        ({**AUTOEP, "validate_folding_routing": 1}, "DS201"),
        ({**AUTOEP, "expert_w1": "a.b"}, "DS202"),
        ({**AUTOEP, "moe_layer_pattern": "("}, "DS202"),
        ({**AUTOEP, "comm_num_sm": 0}, "DS207"),
        ({**AUTOEP, "expert_tensor_parallel_size": 2}, "DS202"),
        ({**AUTOEP, "gate_up_impl": "fused", "use_grouped_mm": False}, "DS209"),
        ({**AUTOEP, "row_weighting_impl": "fused"}, "DS209"),
        ({**AUTOEP, "comm_backend": "deepep"}, "DS209"),
        ({**AUTOEP, "num_limited_groups": 1}, "DS209"),
        ({**AUTOEP, "num_limited_groups": 1, "num_expert_groups": 2, "route_scale": 2}, ""),
        ({**AUTOEP, "enabled": False, "score_apply": "x", "comm_num_sm": 0}, ""),
        ({**AUTOEP, "enabled": 2, "use_grouped_mm": 2}, ""),
    ],
)
def test_autoep_is_checked_where_it_is_on(section: dict[str, Any], code: str) -> None:
    codes = ("DS201", "DS202", "DS207", "DS209")
    found = {
        each
        for each in codes
        for item in said({"expert_parallel": section}, each, target="deepspeed")
        if item.startswith("error")
    }
    assert found == ({code} if code else set())
    assert not said({"expert_parallel": section}, "DS209")  # the harness does not pass it on


@pytest.mark.parametrize("section", ["tensor_parallel", "expert_parallel"])
def test_deepspeeds_groups_divide_the_ranks(section: str) -> None:
    name = "autotp_size" if section == "tensor_parallel" else "autoep_size"
    config = {"train_micro_batch_size_per_gpu": 1, section: {"enabled": True, name: 2}}
    assert "cannot be divided into groups of 2" in said(config, "DS311", target="deepspeed", world_size=3)[0]
    assert not said(config, "DS311", target="deepspeed", world_size=4)


METRIC: dict[str, Any] = {
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
    "difficulty_type": "value",
    "clustering_type": "single_cluster",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"schedule_type": "fixed_linea"}, 'schedule_type is "fixed_linea"'),
        ({"schedule_config": {"difficulty_step": 8}}, "needs total_curriculum_step"),
        ({"schedule_type": "fixed_root"}, "needs root_degree"),
        ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1], "max_step": []}}, "has 1 items"),
        ({"min_difficulty": "8"}, 'min_difficulty is "8", not a number'),
        ({"schedule_type": "custom", "schedule_config": {}}, ""),
    ],
)
def test_a_curriculum_has_what_its_schedule_looks_up(change: dict[str, Any], message: str) -> None:
    learning = {"enabled": True, "data_cluster_path": "c", "curriculum_metrics": {"length": {**METRIC, **change}}}
    config = {"data_efficiency": {"data_sampling": {"curriculum_learning": learning}}}
    found = said(config, "DS209", target="deepspeed")
    assert bool(found) is bool(message) and message in "".join(found)


@pytest.mark.parametrize("text", ["x", "", None, 2, 0, [], [1], False, True, "false", "1.0"])
def test_scaled_gradients_are_compared_as_python_does(text: object) -> None:
    zero = {"zero_optimization": {"stage": 2}}
    assert bool(said({**zero, "prescale_gradients": text}, "DS507")) is bool(text)
    assert bool(said({**zero, "gradient_predivide_factor": text}, "DS507")) is (text != 1)


@pytest.mark.parametrize(
    ("optimizer", "is_said"),
    [
        ({"type": "Muon", "params": {"lr": 0.1}}, True),
        ({"type": "Adagrad", "params": {"lr": 0.1}}, True),
        ({"type": "SGD", "params": {"lr": 0.1}}, False),
        ({"type": "AdamW", "params": {}}, False),
    ],
)
def test_a_schedule_cycles_a_momentum_that_is_there(optimizer: dict[str, Any], is_said: bool) -> None:
    for kind, params in (
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.2}),
        ("OneCycleLR", {"max_lr": 1, "total_steps": 9}),
    ):
        scheduler: dict[str, Any] = {"type": kind, "params": params}
        assert bool(said({"optimizer": optimizer, "scheduler": scheduler}, "DS824", target="deepspeed")) is is_said
        scheduler["params"]["cycle_momentum"] = False
        assert not said({"optimizer": optimizer, "scheduler": scheduler}, "DS824", target="deepspeed")


@pytest.mark.parametrize(
    ("kind", "rates", "is_said"),
    [("Adam", [0.1, 0.2], True), ("Adam", [0.1], False), ("Muon", [0.1, 0.2], False), ("", [0.1, 0.2], False)],
)
def test_a_list_of_rates_fits_deepspeeds_groups(kind: str, rates: list[float], is_said: bool) -> None:
    config = {"optimizer": {"type": kind}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": rates}}}
    assert bool(said(config, "DS823", target="deepspeed")) is is_said


@pytest.mark.parametrize(
    ("optimizer", "code"),
    [
        ({"type": "Adafactor", "params": {"eps": 1e-3}}, "DS207"),
        ({"type": "Adafactor", "params": {"eps": [1e-3, None]}}, "DS207"),
        ({"type": "Adafactor", "params": {"eps": [None, 1e-3], "beta2_decay": -0.8}}, ""),
        ({"type": "Adafactor", "params": {"beta2_decay": True}}, "DS207"),
        ({"type": "Adam", "params": {"eps": [1e-3, 1e-3]}}, "DS207"),
        ({"type": "Adam", "params": {"betas": [None, 0.9]}}, "DS207"),
        ({"type": "NAdam", "params": {"momentum_decay": "auto"}}, "DS303"),
        ({"type": "Adam", "params": {"amsgrad": "no"}}, "DS815"),
        ({"type": "SGD", "params": {"momentum": 0.9, "nesterov": 1, "dampening": 0.5}}, "DS819"),
        ({"type": "SGD", "params": {"differentiable": 0}}, "DS819"),
        ({"type": "", "params": {"lr": "x"}}, ""),  # as without an optimizer
    ],
)
def test_an_optimizers_values_are_read_as_its_class_reads_them(optimizer: dict[str, Any], code: str) -> None:
    codes = ("DS205", "DS207", "DS303", "DS801", "DS815", "DS819")
    found = {
        each
        for each in codes
        for item in said({"optimizer": optimizer}, each, target="deepspeed")
        if item.startswith("error")
    }
    assert found == ({code} if code else set())


def test_parameters_without_a_class_are_unread() -> None:
    for section in ("optimizer", "scheduler"):
        config = {section: {"params": {"lr": "x", "last_epoch": -7, "eta_min": "auto"}}}
        assert f"warning /{section}/params" in said(config, "DS110", target="deepspeed")[0]
        assert not said(config, "DS207", target="deepspeed") and not said(config, "DS303", target="deepspeed")
    assert said({"scheduler": {"type": 0}}, "DS201", target="deepspeed")[0].startswith("error")
