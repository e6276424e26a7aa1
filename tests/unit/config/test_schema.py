"""The schema is JSON Schema 2020-12, describes every key, and is what the installed DeepSpeed reads."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import jsonschema
import pytest

from harness.checking import schema
from harness.checking.schema import bundle, every_key, files
from tests.unit.config.deepspeed_models import MODELS, attribute

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", sorted(files()))
def test_every_file_is_json_schema(name):
    jsonschema.Draft202012Validator.check_schema(files()[name])


def test_the_bundle_is_json_schema_and_complete():
    jsonschema.Draft202012Validator.check_schema(bundle())
    assert set(bundle()["$defs"]) == {name.removesuffix(".json") for name in files()} - {"deepspeed"}
    assert bundle()["properties"].keys() == schema.root().spec["properties"].keys()


def test_every_key_has_a_description():
    assert [pointer for pointer, key in every_key() if not key.spec.get("description")] == []


@pytest.mark.parametrize("preset", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_the_presets_satisfy_it(preset):
    config = json.loads(preset.read_text("utf-8"))
    jsonschema.Draft202012Validator(bundle()).validate(config)
    assert "$schema" not in config  # a path to it would lead nowhere from a copy


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stages": 3}},
        {"zero_optimisation": {"stage": 3}},
        {"train_batch_size": "8"},
        {"fp16": {"enabled": True, "min_loss_scale": 0.5}},
        {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
    ],
)
def test_it_refuses_what_an_editor_should_underline(config):
    assert not jsonschema.Draft202012Validator(bundle()).is_valid(config)


@pytest.mark.parametrize(
    "config",
    [
        {"$schema": "x", "_comment": "y", "train_batch_size": "auto"},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": "auto"}},
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "anything": 1}}},
        {"zero_optimization": True, "aio": None},
    ],
)
def test_it_takes_what_is_right(config):
    jsonschema.Draft202012Validator(bundle()).validate(config)


@pytest.mark.parametrize("pointer", MODELS)
def test_a_checked_section_has_the_keys_and_defaults_of_deepspeeds_model(pointer):
    fields = attribute(MODELS[pointer]).model_fields
    section = schema.find(pointer)
    assert section is not None and section.is_pydantic
    names = set(fields) | {field.alias for field in fields.values() if field.alias}
    names |= {name for name, key in section.keys.items() if key.spec.get("x-harness")}
    come, gone = names - section.keys.keys(), section.keys.keys() - names
    assert not come, f"DeepSpeed has new keys in {pointer}: {sorted(come)}"
    assert not gone, f"DeepSpeed no longer knows in {pointer}: {sorted(gone)}"
    for name, key in section.keys.items():
        if key.spec.get("x-harness"):
            continue
        field = fields.get(name) or next(f for f in fields.values() if f.alias == name)
        extra = field.json_schema_extra or {}
        assert bool(key.spec.get("deprecated")) == bool(extra.get("deprecated")), name
        if "default" in key.spec and not key.is_section and not field.is_required():
            default = field.get_default(call_default_factory=True)
            assert key.spec["default"] == getattr(default, "value", default), name


def test_every_checked_section_is_held_to_a_model():
    pydantic = {p for p, key in every_key() if key.is_pydantic and key.is_section}
    seconds = {"/bfloat16", "/tensor_parallel/tp"}
    assert pydantic - seconds == set(MODELS)


def test_the_removed_features_are_deepspeeds():
    from deepspeed.runtime import config

    assert set(schema.root().spec["x-removed"]) == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(schema.find("/zero_optimization").spec["x-removed"]) == set(config._REMOVED_ZERO_CONFIG_KEYS)


PLAIN = {
    "": ("deepspeed.runtime.constants", ("TRAIN_", "GRADIENT_", "STEPS_", "PRESCALE_", "COMMUNICATION_", "DUMP_")),
    "/aio": ("deepspeed.runtime.swap_tensor.constants", ("AIO_",)),
    "/activation_checkpointing": ("deepspeed.runtime.activation_checkpointing.config", ("ACT_CHKPT_",)),
    "/flops_profiler": ("deepspeed.profiling.constants", ("FLOPS_PROFILER_",)),
    "/autotuning": ("deepspeed.autotuning.constants", ("AUTOTUNING_",)),
}


@pytest.mark.parametrize("pointer", PLAIN)
def test_an_unchecked_section_has_the_keys_and_defaults_of_deepspeeds_constants(pointer):
    module, prefixes = PLAIN[pointer]
    constants = vars(importlib.import_module(module))
    section = schema.find(pointer) if pointer else schema.root()
    for name, default in constants.items():
        key_name = constants.get(name.removesuffix("_DEFAULT"))
        if not (name.endswith("_DEFAULT") and name.startswith(prefixes) and isinstance(key_name, str)) or isinstance(
            default, dict
        ):
            continue
        assert key_name in section.keys, f"DeepSpeed reads {key_name} in {pointer or 'the top level'}"
        stated = section.keys[key_name].spec.get("default")
        assert stated == default or default is None, key_name


def test_the_pipeline_section_has_deepspeeds_defaults():
    from deepspeed.runtime.config import get_pipeline_config

    keys = schema.find("/pipeline").keys
    for name, default in get_pipeline_config({}).items():
        assert keys[name].spec["default"] == default, name


def test_the_arguments_of_deepspeeds_schedules_are_those_of_the_classes():
    import inspect

    from deepspeed.runtime import lr_schedules

    schedules = schema.signatures()["deepspeed_schedulers"]
    assert set(schedules) == set(lr_schedules.VALID_LR_SCHEDULES)
    for name, arguments in schedules.items():
        parameters = list(inspect.signature(getattr(lr_schedules, name).__init__).parameters.values())[2:]
        assert arguments.params == tuple(each.name for each in parameters)
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        assert arguments.defaults == defaults


def test_the_schedules_of_torch_are_those_that_deepspeed_looks_up():
    import inspect

    from torch.optim import lr_scheduler
    from torch.optim.lr_scheduler import LRScheduler

    classes = {
        name: each
        for name, each in vars(lr_scheduler).items()
        if isinstance(each, type) and issubclass(each, LRScheduler) and each is not LRScheduler and name[0] != "_"
    }
    listed = schema.signatures()["torch_schedulers"]
    assert set(listed) <= set(classes)
    for name, arguments in listed.items():
        parameters = list(inspect.signature(classes[name].__init__).parameters.values())[2:]
        assert arguments.params == tuple(each.name for each in parameters if each.name != "verbose"), name
    assert set(classes) - set(listed) <= {"ChainedScheduler", "SWALR"}  # of other schedules, and of another module


def test_the_modules_of_torch_are_those_that_deepspeed_can_import():
    import torch

    assert schema.torch_modules() == tuple(sorted(n for n, each in vars(torch.nn).items() if isinstance(each, type)))


def test_the_names_of_autoep_are_those_of_deepspeed():
    from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names
    from deepspeed.moe.ep_experts import EXPERT_ACTIVATIONS

    assert schema.find("/expert_parallel/preset_model").core["enum"] == list(available_preset_names())
    assert schema.find("/expert_parallel/expert_activation").core["enum"] == list(EXPERT_ACTIVATIONS)
