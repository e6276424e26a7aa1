"""Every key of the schema acts in a run of the harness, is refused, or is reported to have no effect there.

ACTS says who reads a key in a run; each entry stands for the keys below it. tests/distributed/test_config_reads.py
runs, and holds DeepSpeed to it; what the harness reads itself is compared here. A key that is in no entry must have a
finding as soon as it holds another value than its default, at the stage and beside the keys that it needs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from harness.checking import check, resolve
from harness.checking.schema import Key, every_key
from harness.config import AutoValues
from harness.config.text.diagnostic import Severity
from harness.config.text.document import from_text
from harness.config.values.idle_keys import IDLE, without_idle
from harness.config.values.pointers import put

ACTS = {
    "/$schema": "editors",
    "/train_batch_size": "resolve",
    "/train_micro_batch_size_per_gpu": "resolve",
    "/gradient_accumulation_steps": "resolve",
    "/gradient_clipping": "ZeRO's optimizers; the harness's own norm at ZeRO-0",
    "/steps_per_print": "DeepSpeed's throughput and timer lines in logs/rank_0.log",
    "/prescale_gradients": "the engine's reduction",
    "/gradient_predivide_factor": "the engine's reduction",
    "/gradient_allreduce_op": "the engine's reduction",
    "/communication_data_type": "the engine's reduction",
    "/zero_allow_untested_optimizer": "the rule on untested optimizers",
    "/zero_force_ds_cpu_optimizer": "the engine, where the config names an optimizer",
    "/wall_clock_breakdown": "the engine's timers in logs/rank_0.log",
    "/memory_breakdown": "the engine's lines in logs/rank_0.log",
    "/dump_state": "the engine's lines in logs/rank_0.log",
    "/disable_python_gc": "deepspeed.initialize",
    "/log_level": "DeepSpeed's logger",
    "/sequence_parallel_size": "the layout",
    "/fp16": "the engine's loss scaling",
    "/bf16": "the engine's and ZeRO's optimizers",
    "/bfloat16": "as bf16",
    "/torch_autocast": "the engine's forward",
    "/data_types": "the engine's gradient buffers and casts",
    "/zero_optimization": "ZeRO's optimizers and zero.Init; weights are gathered on saving in any case",
    "/optimizer": "the engine's optimizer",
    "/scheduler": "the engine's schedule",
    "/activation_checkpointing": "deepspeed.checkpointing, configured by the harness",
    "/pipeline/stages": "the layout",
    "/pipeline/partition": "stage boundaries",
    "/pipeline/schedule": "the order in which stages compute",
    "/pipeline/chunks_per_stage": "stage boundaries",
    "/pipeline/activation_checkpoint_interval": "the staged module",
    "/pipeline/pipe_partitioned": "PipelineEngine",
    "/pipeline/grad_partitioned": "PipelineEngine",
    "/pipeline/use_reentrant": "the staged module",
    "/context_parallel": "the layout",
    "/tiling": "the decoder layers and the epilogue",
    "/gradient_compression": "the reduction of gradients of the harness",
    "/gradient_reduction": "the optimizer of ZeRO-2",
    "/aio": "offloading to NVMe",
    "/comms_logger": "DeepSpeed's collectives; the summary is printed at the end of training",
    "/tensorboard": "the engine's monitor",
    "/csv_monitor": "the engine's monitor",
    "/wandb": "the engine's monitor",
    "/comet": "the engine's monitor",
    "/flops_profiler": "the engine; the harness ends the profile of a pipeline's step",
    "/timers": "the engine's throughput timer",
    "/tensor_parallel/autotp_size": "the layout",
    "/tensor_parallel/sequence_parallel": "the decoder layers, and the rules on sequence parallelism",
    "/compile/enabled": "the decoder layers, and the rule on ZeRO-3",
    "/compile/backend": "the decoder layers",
    "/expert_parallel/enabled": "the layout",
    "/expert_parallel/autoep_size": "the layout",
    "/expert_parallel/token_pieces": "the exchange of tokens",
}
# switches that must be on before the keys beside them mean anything
BESIDE: dict[str, dict[str, Any]] = {
    "/data_efficiency": {"enabled": True},
    "/compile": {"deepcompile": True},
    "/hybrid_engine": {"enabled": True},
    "/autotuning": {"enabled": True},
}


def other(key: Key) -> Any:
    """A value that is not the key's default."""
    default, kinds = key.spec.get("default"), key.types
    choices = [choice for choice in key.core.get("enum", ()) if choice != default]
    if choices:
        return choices[0]
    samples = {"boolean": not default, "integer": 2, "number": 0.5, "string": "x", "array": ["a.b"], "object": {"a": 1}}
    return next((samples[kind] for kind in kinds if kind in samples), 1)


def acts(pointer: str) -> bool:
    return any(pointer == known or pointer.startswith(f"{known}/") for known in ACTS) and pointer not in IDLE


SILENT = [(pointer, key) for pointer, key in every_key() if not key.is_section and not acts(pointer)]


@pytest.mark.parametrize(("pointer", "key"), SILENT, ids=[pointer for pointer, _ in SILENT])
def test_a_key_that_does_not_act_is_reported(pointer, key):
    config: dict[str, Any] = {"train_batch_size": 8}
    section = "/" + pointer.split("/")[1]
    if section in BESIDE:
        config[section[1:]] = dict(BESIDE[section])
    if section == "/zero_optimization":
        config["zero_optimization"] = {"stage": 3}
    put(config, pointer, other(key))
    found = [finding for finding in check(from_text(json.dumps(config))) if finding.severity is not Severity.INFO]
    assert [finding for finding in found if finding.pointer.startswith(section)], config


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"train_batch_size": 16}, {}),
        ({"train_micro_batch_size_per_gpu": 1}, {}),
        ({"gradient_accumulation_steps": 2}, {}),
        ({"pipeline": {"stages": 2}}, {}),
        ({"pipeline": {"stages": 2, "partition": "uniform"}}, {"pipeline": {"stages": 2}}),
        ({"pipeline": {"stages": 2, "schedule": "gpipe"}}, {"pipeline": {"stages": 2}}),
        (
            {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks_per_stage": 3}},
            {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks_per_stage": 2}},
        ),
        ({"pipeline": {"activation_checkpoint_interval": 1}}, {}),
        ({"tensor_parallel": {"autotp_size": 2}}, {}),
        (
            {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}},
            {"tensor_parallel": {"autotp_size": 2}},
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
            {"tensor_parallel": {"autotp_size": 2}},
        ),
        ({"expert_parallel": {"token_pieces": 2}}, {}),
        ({"compile": {"enabled": True}}, {}),
        ({"compile": {"enabled": True, "backend": "eager"}}, {"compile": {"enabled": True}}),
        ({"gradient_compression": {"bits": 8}}, {}),
        (
            {"zero_optimization": {"stage": 2}, "gradient_reduction": {"once_per_step": True}},
            {"zero_optimization": {"stage": 2}},
        ),
        ({"context_parallel": {"size": 2}}, {}),
        ({"tiling": {"loss": 512}}, {}),
        ({"tiling": {"attention": 512}}, {}),
        ({"tiling": {"feed_forward": 512}}, {}),
        ({"sequence_parallel_size": 2}, {}),
        ({"zero_optimization": {"stage": 1}}, {}),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, {"zero_optimization": {"stage": 1}}),
    ],
    ids=str,
)
def test_what_the_harness_reads_itself_changes_the_run(changes, layout):
    def resolved(config):
        found = resolve({"train_batch_size": 8, **config}, AutoValues(world_size=4))
        return replace(found, config={}, alone={}, filled=())

    assert resolved(changes) != resolved(layout)


def test_what_has_no_effect_is_in_the_schema():
    known = {pointer for pointer, _ in every_key()}
    assert set(IDLE) <= known
    assert known >= {pointer for pointer in ACTS if pointer != "/$schema"}


def test_what_would_break_a_run_is_not_handed_on():
    config = {
        "autotuning": {"enabled": True},
        "checkpoint": {"writer": {}, "use_node_local_storage": True},
        "zero_optimization": {"stage": 3, "zenflow": {}},
        "zero_force_ds_cpu_optimizer": True,
    }
    kept = without_idle(config)
    assert kept == {
        "checkpoint": {"use_node_local_storage": True},
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
    }
    assert config["autotuning"]


REFUSED = [
    ({"managed_gradient_accumulation": False}, "DS108"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}}, "DS108"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "DS108"),
    ({"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 1000}}, "DS108"),
    ({"zero_optimization": {"stage": 2, "zenflow": {}}}, "DS513"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "DS108"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": {"stage": 2}}, "DS404"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "reduce_scatter": False}}, "DS108"),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}, "tensor_parallel": {"autotp_size": 2}},
        "DS108",
    ),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "DS104"),
    ({"optimizer": {"type": "Muon", "params": {"ns_method": "grams"}}}, "DS810"),
    ({"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}}, "DS810"),
    ({"optimizer": {"type": "muon", "params": {"momentun": 0.9}}}, "DS803"),
]


@pytest.mark.parametrize(("config", "code"), REFUSED)
def test_what_would_fail_late_is_refused_at_once(config, code):
    found = check(from_text(json.dumps({"train_batch_size": 8} | config)))
    assert [item.code for item in found if item.severity is Severity.ERROR] == [code]
