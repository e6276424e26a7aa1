"""Advice is checked itself: whoever does what a hint says is rid of the finding, and gets no error instead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.checking import check, resolve
from harness.checking.registry import RULES
from harness.config import AutoValues
from harness.config.text.diagnostic import ConfigError, Diagnostic, Severity
from harness.config.text.document import from_text, from_values
from harness.config.values.pointers import put
from tests.unit.config.advice import alternatives

WITHOUT_RUN = [rule for rule in RULES if rule.code not in ("DS001", "DS951")]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("deepspeed", {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 9}}}),
    ("deepspeed", {"optimizer": {"type": "Sophia", "params": {"rho": 0.1}}, "zero_optimization": {"stage": 2}}),
    ("harness", {"optimizer": {"type": "Sofia", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}),
    ("harness", {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}, "zero_optimization": {"stage": 2}}),
    ("deepspeed", {"optimizer": {"type": "SGD", "params": {"nesterov": True, "dampening": 0.1}}}),
    ("deepspeed", {"optimizer": {"type": "MuAdam", "params": {"eps": 1e-8, "whatever": 1}}}),
    ("harness", {"scheduler": {"type": "LambdaLR", "params": {}}}),
    ("harness", {"scheduler": {"type": "StepLR"}}),
    ("harness", {"scheduler": {"type": "Cosine", "params": {"T_max": 9}}}),
    ("harness", {"scheduler": {"type": "LinearLR", "params": {}}, "zero_optimization": {"stage": 3}}),
    ("harness", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}),
    ("deepspeed", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}),
    ("harness", {"zero_optimization": {"stage": 2, "cpu_offload": "true"}}),
    ("harness", {"zero_optimization": {"stage": 1, "cpu_offload_param": True}}),
    ("harness", {"zero_optimization": {"stage": 3}, "compile": {"backend": "eager"}}),
    ("deepspeed", {"compile": {"passes": ["z9"]}}),
    ("deepspeed", {"communication_data_type": 5}),
    ("deepspeed", {"zero_optimization": {"stage": 2, "offload_optimizer": {"pin_memory": False}}}),
    ("deepspeed", {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "zero_optimization": {"stage": 1}}),
    *(
        (
            target,
            {
                "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": states},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, **zenflow},
                "optimizer": {"type": "AdamW", "params": params},
            },
        )
        for states in (True, False)
        for target, params, zenflow in (("harness", {"torch_adam": True}, {}), ("deepspeed", {}, {"zenflow": {}}))
    ),
    ("hf", {"tensor_parallel": {"preset_model": "llama"}}),
    ("deepspeed", {"expert_parallel": {"enabled": True, "gate_up_impl": "fused", "use_grouped_mm": False}}),
    ("deepspeed", {"expert_parallel": {"enabled": True, "comm_backend": "deepep", "comm_max_tokens_per_rank": 0}}),
    ("deepspeed", {"expert_parallel": {"enabled": True, "num_limited_groups": 2, "has_shared_experts": 1}}),
    ("deepspeed", {"expert_parallel": {"enabled": True, "preset_model": "x", "expert_tensor_parallel_size": 2}}),
    ("deepspeed", {"optimizer": {"params": {"lr": 0.1}}, "scheduler": {"type": None, "params": {"gamma": 0.1}}}),
    ("deepspeed", {"optimizer": {"type": "Adafactor", "params": {"eps": 0.1, "beta2_decay": 1}}}),
    ("deepspeed", {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "differentiable": 1}}}),
    *(
        ("deepspeed", {"optimizer": {"type": "Muon", "params": {}}, "scheduler": {"type": kind, "params": params}})
        for kind, params in (("CyclicLR", {"base_lr": 0.1, "max_lr": 0.2}), ("MultiStepLR", {"milestones": 5}))
    ),
    (
        "deepspeed",
        {"optimizer": {"type": "SGD"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}},
    ),
    ("deepspeed", {"flops_profiler": {"enabled": True, "detailed": "x", "module_depth": [1]}}),
]


def advised_wrongly(config: dict[str, Any], found: list[Diagnostic], **options: Any) -> list[str]:
    """Return each hint that leaves its finding there, or brings an error where nothing was found before."""
    before, wrong = {(item.code, item.pointer) for item in found}, []
    for item in found:
        for alternative in alternatives(item.hint, item.pointer, config):
            for changed in alternative:
                after = check(from_text(json.dumps(changed)), **options)
                stays = any((each.code, each.pointer) == (item.code, item.pointer) for each in after)
                new = [each for each in after if each.severity is Severity.ERROR]
                new = [each for each in new if (each.code, each.pointer) not in before]
                if new or (stays and item.message in [each.message for each in after]):
                    wrong.append(f"{item.code} {item.hint} -> {json.dumps(changed)} {[each.message for each in new]}")
    return wrong


@pytest.mark.parametrize("rule", WITHOUT_RUN, ids=lambda rule: rule.code)
def test_the_advice_of_a_rule_works(rule):
    document, options = from_text(rule.wrong), dict(rule.options)
    if arguments := options.pop("arguments", None):
        options["arguments"] = AutoValues(**arguments, given=frozenset(arguments))
    assert not advised_wrongly(document.data, check(document, **options), **options)


@pytest.mark.parametrize(("target", "config"), MORE, ids=lambda value: value if isinstance(value, str) else "")
def test_the_advice_works_in_other_configs(target, config):
    config = {"train_batch_size": 8, **config}
    found = check(from_values(config), target=target)
    assert found and not advised_wrongly(config, found, target=target)


CONFLICTS = [
    ({"gradient_clipping": 1.0}, {"max_grad_norm": 0.5}),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, {"learning_rate": 0.2}),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}}}, {"adam_beta2": 0.95}),
    ({"optimizer": {"type": "Lion", "params": {}}}, {"optim": "sgd"}),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, {"warmup_steps": 9}),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, {"lr_scheduler_type": "linear"}),
    ({"bf16": {"enabled": False}}, {"bf16": True}),
    ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}),
]


@pytest.mark.parametrize(("config", "arguments"), CONFLICTS, ids=str)
def test_a_conflict_with_an_argument_ends_where_the_advice_says(config, arguments):
    values = AutoValues(**arguments, given=frozenset(arguments))
    config = {"train_micro_batch_size_per_gpu": 1, **config}
    with pytest.raises(ConfigError) as refused:
        resolve(config, values)
    (found,) = refused.value.diagnostics
    assert found.code == "DS951"
    if "auto" in found.hint:
        put(config, found.pointer, "auto")
    else:
        assert "remove scheduler" in found.hint
        del config["scheduler"]
    resolve(config, values)
