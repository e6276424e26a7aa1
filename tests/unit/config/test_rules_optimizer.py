"""The borders of the rules about optimizers and schedules: names, classes that are built, their arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.checking import check
from harness.config.text.document import from_text, from_values
from harness.config.values.pointers import put
from harness.optimizers import OPTIMIZERS
from tests.unit.config.said import said


def optimizer(kind: object, config: dict[str, Any] | None = None, **params: object) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}, **(config or {})}


def schedule(kind: object, **params: object) -> dict[str, Any]:
    return {**optimizer("AdamW"), "scheduler": {"type": kind, "params": params}}


CPU = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
LIST = "use Adagrad, Adam, AdamW or Lion, or a class of torch.optim"


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("AdamWW", "did you mean AdamW?"),
        ("adam-w", "did you mean AdamW?"),
        ("sgd", "did you mean SGD?"),  # classes of torch are named as torch writes them
        ("Sophia", LIST),
        ("", LIST),
        ("LAMB", ""),
        ("SGD", ""),
        ("auto", ""),
        (None, ""),
        (5, ""),  # another rule's
        ("OneBitAdam", ""),  # another rule's
    ],
)
def test_the_name_of_an_optimizer_is_known(kind: object, hint: str) -> None:
    found = said(optimizer(kind), "DS801")
    assert found == ([f"error /optimizer/type: unknown optimizer {kind}; {hint}"] if hint else [])


def test_auto_is_no_optimizer_without_the_harness() -> None:
    assert said(optimizer("auto"), "DS801", target="deepspeed")[0].startswith(
        "error /optimizer/type: unknown optimizer"
    )


@pytest.mark.parametrize(
    ("kind", "instead"),
    [("OneBitAdam", "AdamW"), ("onebit_lamb", "Lamb"), ("ZEROONEADAM", "AdamW"), ("OneBit", "")],
)
def test_a_removed_optimizer_is_named_with_its_successor(kind: str, instead: str) -> None:
    words = f"{kind} is an optimizer that DeepSpeed has removed; use {instead}"
    assert said(optimizer(kind), "DS802") == ([f"error /optimizer/type: {words}"] if instead else [])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_rate_is_an_argument_of_every_optimizer(kind: str) -> None:
    assert said(optimizer(kind, lr=0.1), "DS801") == said(optimizer(kind, lr=0.1), "DS803") == []


@pytest.mark.parametrize(
    ("config", "param", "words"),
    [
        pytest.param(optimizer("AdamW", amsgrad=True), "amsgrad", "", id="fused"),
        pytest.param(
            optimizer("AdamW", fp32_optimiser_states=True),
            "fp32_optimiser_states",
            "FusedAdam has no parameter fp32_optimiser_states; did you mean fp32_optimizer_states?",
            id="a misspelling",
        ),
        pytest.param(
            optimizer("Adam", adamw_mode=False),
            "adamw_mode",
            "FusedAdam has no parameter adamw_mode; did you mean adam_w_mode?",
        ),
        pytest.param(
            optimizer("Adam", CPU, adamw_mode=False), "adamw_mode", "the engine sets adamw_mode itself; remove it"
        ),
        pytest.param(
            optimizer("AdamW", torch_adam=True, bias_correction=True),
            "bias_correction",
            "AdamW has no parameter bias_correction; remove it",
            id="torch's own",
        ),
        pytest.param(
            optimizer("Adam", torch_adam=True, adam_w_mode=False, decoupled=1),
            "decoupled",
            "Adam has no parameter decoupled; remove it",
            id="torch's older one",
        ),
        pytest.param(optimizer("Lion", eps=1e-8), "eps", "FusedLion has no parameter eps; remove it", id="Lion"),
        pytest.param(optimizer("Lion", CPU, eps=1e-8), "eps", "DeepSpeedCPULion has no parameter eps; remove it"),
        pytest.param(
            optimizer("Adagrad", CPU, lr_decay=0.1),
            "lr_decay",
            "DeepSpeedCPUAdagrad has no parameter lr_decay; remove it",
        ),
        pytest.param(optimizer("Adagrad", lr_decay=0.1), "lr_decay", "", id="torch's Adagrad"),
        pytest.param(optimizer("SGD", momentun=1), "momentun", "SGD has no parameter momentun; did you mean momentum?"),
        pytest.param(
            optimizer("SGD", momentun=1, momentum=1), "momentun", "SGD has no parameter momentun; remove it", id="both"
        ),
        pytest.param(optimizer("SGD", max_grad_norm=1), "max_grad_norm", "", id="another rule's"),
        pytest.param(optimizer("MuAdamW", whatever=1), "whatever", "", id="a class that is not known"),
        pytest.param(optimizer("Sophia", rho=1), "rho", "", id="a name that is not known"),
        pytest.param(optimizer("Muon", nesterov=1), "nesterov", "Muon has no parameter nesterov; remove it", id="Muon"),
        pytest.param(
            optimizer("MUON", ns_methods=1), "ns_methods", "Muon has no parameter ns_methods; did you mean ns_method?"
        ),
        pytest.param(optimizer("Muon", muon_lr=0.1, adam_lr=0.1), "muon_lr", "", id="Muon's two rates"),
    ],
)
def test_an_argument_is_one_of_the_class_that_is_built(config: dict[str, Any], param: str, words: str) -> None:
    assert said(config, "DS803") == ([f"error /optimizer/params/{param}: {words}"] if words else [])


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        (optimizer("AdamW", max_grad_norm=1.0), "move it to gradient_clipping"),
        (
            optimizer("AdamW", {"gradient_clipping": 1.0}, max_grad_norm=1.0),
            "remove it; gradient_clipping is set as well",
        ),
        (optimizer("AdamW", {"gradient_clipping": 1.0}), ""),
    ],
)
def test_clipping_is_no_argument_of_the_optimizer(config: dict[str, Any], hint: str) -> None:
    words = f"error /optimizer/params/max_grad_norm: max_grad_norm is not a parameter of the optimizer; {hint}"
    assert said(config, "DS804") == ([words] if hint else [])


@pytest.mark.parametrize(
    ("kind", "config", "is_said"),
    [
        ("SGD", {"zero_optimization": {"stage": 1}}, True),
        ("SGD", {"zero_optimization": True}, True),
        ("SGD", {"zero_optimization": {"stage": 0}}, False),
        ("SGD", {"zero_optimization": {"stage": "three"}}, False),  # another rule's
        ("SGD", {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}, False),
        ("ADAGRAD", {"zero_optimization": {"stage": 3}}, False),
        ("Sophia", {"zero_optimization": {"stage": 3}}, False),  # another rule's
    ],
)
def test_zero_runs_with_optimizers_that_were_tested(kind: str, config: dict[str, Any], is_said: bool) -> None:
    words = f"error /optimizer/type: DeepSpeed has not tested ZeRO with {kind}; "
    words += "use Adagrad, Adam, AdamW or Lion, or set zero_allow_untested_optimizer to true"
    assert said(optimizer(kind, config, lr=0.1), "DS805") == [words] * is_said


@pytest.mark.parametrize(
    ("scale", "is_said"), [(128, True), ("128", True), (0, False), (0.0, False), ("auto", False), (None, False)]
)
def test_lamb_scales_adaptively(scale: object, is_said: bool) -> None:
    words = f"error /fp16/loss_scale: Lamb needs an adaptive loss scale, but fp16.loss_scale is {scale}; "
    found = said(optimizer("lamb", {"fp16": {"loss_scale": scale}}), "DS806")
    assert found == [words + "set fp16.loss_scale to 0"] * is_said
    assert said(optimizer("AdamW", {"fp16": {"loss_scale": scale}}), "DS806") == []


@pytest.mark.parametrize(
    ("config", "pointer", "words"),
    [
        (
            optimizer("AdamW", CPU, torch_adam=True),
            "/params/torch_adam",
            "torch.optim.AdamW runs in PyTorch on the CPU; remove torch_adam",
        ),
        (optimizer("SGD", CPU), "/type", "SGD runs in PyTorch on the CPU; use Adagrad, Adam, AdamW or Lion"),
        (optimizer("AdamW", CPU), "", ""),
        (optimizer("Lion", CPU), "", ""),
        (optimizer("SGD", {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}), "", ""),
        (optimizer("SGD", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}), "", ""),
        (optimizer("Sophia", CPU), "", ""),
    ],
)
def test_an_offloaded_step_is_vectorised_for_three(config: dict[str, Any], pointer: str, words: str) -> None:
    assert said(config, "DS807") == ([f"warning /optimizer{pointer}: the offloaded step of {words}"] if words else [])


@pytest.mark.parametrize(
    ("config", "target", "words"),
    [
        (
            optimizer("LBFGS"),
            "harness",
            "LBFGS cannot train here: it needs a closure that calls the model, which "
            "DeepSpeed does not give it; use AdamW",
        ),
        (
            optimizer("Muon", ns_method="quick"),
            "harness",
            'Muon cannot train here: ns_method is quick; set ns_method to "gram" or "standard"',
        ),
        (optimizer("Muon", ns_method="gram"), "harness", ""),
        (
            optimizer("muon", per_head_muon="yes"),
            "harness",
            "muon cannot train here: per_head_muon needs a model that is not cut into layers; remove per_head_muon",
        ),
        (optimizer("Muon", per_head_muon=True), "deepspeed", ""),
        (optimizer("Muon", {"zero_optimization": {"stage": 3}}), "harness", ""),
        (
            optimizer("Muon", {"zero_optimization": {"stage": 3}}),
            "deepspeed",
            "Muon cannot train here: at ZeRO-3 it needs "
            "gradients that are whole; set zero_optimization.reduce_scatter to false",
        ),
        (optimizer("Muon", {"zero_optimization": {"stage": 3, "reduce_scatter": False}}), "deepspeed", ""),
        (optimizer("Muon", {"zero_optimization": {"stage": 2}}), "hf", ""),
    ],
)
def test_what_cannot_train_is_told(config: dict[str, Any], target: str, words: str) -> None:
    assert said(config, "DS810", target=target) == ([f"error /optimizer/type: {words}"] if words else [])


STEPS = "warmup_num_steps"


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("WarmupDecay", "use WarmupDecayLR with its own parameters"),
        ("warmuplr", "did you mean WarmupLR?"),
        ("Linear", "did you mean LinearLR?"),
        (
            "zigzag",
            "use LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR or WarmupLR with its own parameters, or a class",
        ),
        ("CosineAnnealingLR", ""),
        (None, ""),
    ],
)
def test_the_name_of_a_schedule_is_known(kind: object, hint: str) -> None:
    found = said(schedule(kind), "DS811")
    assert len(found) == bool(hint)
    assert not hint or found[0].startswith(f"error /scheduler/type: unknown scheduler {kind}; {hint}")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            schedule("WarmupCosineLR", total_num_steps=9, warmup_max_lr=1),
            "warmup_max_lr: WarmupCosineLR has no parameter warmup_max_lr; WarmupDecayLR or WarmupLR has; remove it",
        ),
        (
            schedule("WarmupLR", warmup_steps=9),
            "warmup_steps: WarmupLR has no parameter warmup_steps; did you mean warmup_num_steps?",
        ),
        (
            schedule("WarmupLR", warmup_steps=9, warmup_num_steps=9),
            "warmup_steps: WarmupLR has no parameter warmup_steps; remove it",
        ),
        (schedule("WarmupLR", gamma=1), "gamma: WarmupLR has no parameter gamma; remove it"),
        (schedule("zigzag", gamma=1), ""),
    ],
)
def test_an_argument_is_one_of_the_schedule(config: dict[str, Any], words: str) -> None:
    found = said(config, "DS812")
    assert found == ([f"error /scheduler/params/{words}"] if words else [])


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (
            {"type": "WarmupDecayLR", "params": {}},
            "params: WarmupDecayLR needs total_num_steps; add total_num_steps to scheduler.params",
        ),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}, ""),
        (
            {"type": "WarmupDecayLR"},
            "type: WarmupDecayLR needs total_num_steps; add total_num_steps to scheduler.params",
        ),
        ({"type": "WarmupLR"}, 'type: WarmupLR needs params; add "params": {}'),
        ({"type": "WarmupLR", "params": None}, 'params: WarmupLR needs params; add "params": {}'),
        ({"type": "WarmupLR", "params": {}}, ""),
        ({"type": "StepLR", "params": {}}, "params: StepLR needs step_size; add step_size to scheduler.params"),
        (
            {"type": "StepLR", "params": {"step_size": "auto"}},
            "params: StepLR needs step_size; add step_size to scheduler.params",
        ),
    ],
)
def test_what_a_schedule_needs_is_there(scheduler: dict[str, Any], words: str) -> None:
    found = said({**optimizer("AdamW"), "scheduler": scheduler}, "DS813")
    assert found == ([f"error /scheduler/{words}"] if words else [])


@pytest.mark.parametrize(
    ("steps", "target", "words"),
    [
        (0, "harness", "warning {}0; write 1, which has the same effect"),
        (0, "deepspeed", "error {}0; write 1, which has the same effect"),
        (-1, "harness", "error {}-1; use a whole number of at least 1"),
        (1.5, "harness", "error {}1.5; use a whole number of at least 1"),
        (1.0, "harness", ""),  # which DeepSpeed's reader takes for 1
        ("9", "harness", "error {}'9'; use a whole number of at least 1"),
        (True, "harness", "error {}True; use a whole number of at least 1"),
        (None, "harness", "error {}None; use a whole number of at least 1"),
        (1, "harness", ""),
        ("auto", "harness", ""),
    ],
)
def test_a_warm_up_has_a_step(steps: object, target: str, words: str) -> None:
    found = said(schedule("WarmupLR", **{STEPS: steps}), "DS814", target=target)
    pointer = f"/scheduler/params/{STEPS}: {STEPS} is "
    assert found == ([words.format(pointer)] if words else [])
    assert said(schedule("OneCycle", **{STEPS: steps}), "DS814", target=target) == []


@pytest.mark.parametrize(
    ("section", "name", "impossible", "possible"),
    [
        ("optimizer", "lr", [-1, -1e-9, "1e-4", True, None, [0.1]], [0, 1e-3, 10]),
        (
            "optimizer",
            "betas",
            [[2, 3], [0.9, 1], [-0.1, 0.9], [0.9], [0.9, 0.95, 0.99], 0.9, ["0.9", 0.95]],
            [[0.9, 0.999], [0, 0]],
        ),
        ("optimizer", "adam_w_mode", ["false", [1]], [False, True]),
        ("optimizer", "eps", [-1e-8], [0, 1e-8]),
        ("optimizer", "weight_decay", [-0.1], [0, 0.1]),
        ("scheduler", "warmup_min_lr", [-1], [0, 1e-5]),
        ("scheduler", "warmup_max_lr", [[1e-3, -1e-3]], [[1e-3, 1e-3]]),
        ("scheduler", "total_num_steps", [-5, 0, 1.5, "100", None], [1, 1e5]),
        ("scheduler", "last_batch_iteration", [-2, 0.5], [-1, 7]),
        ("scheduler", "warmup_type", ["cubic", 1], ["log", "linear"]),
    ],
)
def test_a_number_that_nobody_can_mean_is_refused(section, name, impossible, possible):
    def codes(value):
        params = {"optimizer": {"lr": 0.1}, "scheduler": {"total_num_steps": 100}}
        params[section][name] = value
        config = {"optimizer": {"type": "AdamW", "params": params["optimizer"]}}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": params["scheduler"]}
        found = check(from_text(json.dumps({"train_batch_size": 8, **config})))
        return [item.pointer for item in found if item.code == "DS207"]

    assert [codes(value) for value in impossible] == [[f"/{section}/params/{name}"]] * len(impossible)
    assert [codes(value) for value in possible] == [[]] * len(possible)


def test_a_schedule_that_only_python_can_describe_is_refused():
    scheduler = {"type": "LambdaLR", "params": {"lr_lambda": "lambda step: 1"}}
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "scheduler": scheduler}
    (found,) = [item for item in check(from_values(config)) if item.code == "DS207"]
    assert "lr_lambda is a function, which no JSON can hold" in found.message


@pytest.mark.parametrize(
    ("pointer", "impossible"),
    [
        ("/gradient_clipping", -1),
        ("/gradient_predivide_factor", 0),
        ("/fp16/hysteresis", -1),
        ("/fp16/loss_scale_window", 0),
        ("/flops_profiler/profile_step", -3),
        ("/aio/queue_depth", 0),
        ("/activation_checkpointing/number_checkpoints", 10**400),
    ],
)
def test_so_is_a_number_of_another_section(pointer, impossible):
    config: dict = {"train_batch_size": 8}
    put(config, pointer, impossible)
    found = [item for item in check(from_values(config)) if item.pointer == pointer and item.code != "DS110"]
    assert [(item.code, item.severity.value) for item in found] == [("DS207", "error")]
