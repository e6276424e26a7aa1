"""Keys that have no effect in a run of the harness, and are not handed on to DeepSpeed.

The harness reads the data, cuts the model, builds the optimizer and writes the model itself, so keys for DeepSpeed's
own ways of doing so have no effect. Some of them would break a run: `autotuning` ends it after a few steps,
`hybrid_engine` replaces the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup, name_of

_DATA = "the harness reads the data itself, in an order that depends on the seed"
_COMPILE = "the harness does not compile the model through DeepSpeed"
_WRITES = "the harness chooses how checkpoints are written and read"
_NOBODY = "DeepSpeed reads it and does nothing with it"

IDLE: dict[str, str] = {
    "/dataloader_drop_last": _DATA,
    "/data_efficiency/enabled": _DATA,
    "/data_efficiency/data_sampling/enabled": _DATA,
    "/data_efficiency/data_sampling/curriculum_learning/enabled": _DATA,
    "/data_efficiency/data_sampling/dynamic_batching/enabled": _DATA,
    "/data_efficiency/data_routing/enabled": "random layer token dropping needs a model written for it",
    "/data_efficiency/data_routing/random_ltd/enabled": "random layer token dropping needs a model written for it",
    "/compile/deepcompile": _COMPILE,
    "/compile/passes": _COMPILE,
    "/hybrid_engine/enabled": "the harness does not generate text during training",
    "/autotuning/enabled": "only `deepspeed --autotuning` tunes; inside a run it would end the training",
    "/weight_quantization": "it quantizes a model for inference",
    "/datastates_ckpt": _WRITES,
    "/checkpoint/writer": _WRITES,
    "/checkpoint/load_universal": _WRITES,
    "/checkpoint/tag_validation": "the harness compares what all ranks save by itself",
    "/checkpoint/use_node_local_storage": _WRITES,
    "/checkpoint/checkpoint_serialization": "the harness writes safetensors",
    "/checkpoint/parallel_write/pipeline_stage": "in the harness every rank writes its own share of a checkpoint",
    "/pipeline/seed_layers": "the harness seeds every layer separately",
    "/fp16/auto_cast": "the harness casts the inputs itself",
    "/data_parallel_size": "the data-parallel size is ranks / (pipeline stages x tensor-parallel ranks)",
    "/seq_parallel_communication_data_type": "the harness has no sequence parallelism",
    "/use_data_before_expert_parallelism": "the harness deals experts among tensor-parallel ranks first",
    "/zero_optimization/zenflow": "the optimizer steps on all parameters at every step",
    "/zero_optimization/override_module_apply": "the harness initialises the weights before DeepSpeed partitions them",
    "/zero_optimization/allgather_partitions": _NOBODY,
    "/zero_optimization/load_from_fp32_weights": _WRITES,
    "/zero_optimization/elastic_checkpoint": "any number of ranks can go on from a checkpoint of the harness",
    "/zero_optimization/pipeline_loading_checkpoint": _WRITES,
    "/zero_optimization/save_muon_momentum_buffer_in_memory": "the harness brings its own Muon",
    "/optimizer/legacy_fusion": "fp16 runs at ZeRO stage 1 or higher, which has its own optimizer",
    "/disable_allgather": _NOBODY,
    "/vocabulary_size": _NOBODY,
    "/allgather_size": _NOBODY,
}

# kernels that DeepSpeed has only for accelerators, by the pointer that asks for them
ACCELERATED: dict[str, tuple[str, ...]] = {
    "/optimizer/type": ("lamb", "lion"),
    "/zero_optimization/zero_quantized_weights": ("true",),
    "/zero_optimization/zero_quantized_nontrainable_weights": ("true",),
    "/zero_optimization/zero_quantized_gradients": ("true",),
    "/zero_optimization/offload_optimizer/super_offload": ("true",),
    "/aio/use_gds": ("true",),
}

_DROPPED = (
    "/dataloader_drop_last",
    "/data_efficiency",
    "/compile",
    "/hybrid_engine",
    "/autotuning",
    "/weight_quantization",
    "/datastates_ckpt",
    "/checkpoint/writer",
    "/checkpoint/load_universal",
    "/fp16/auto_cast",
    "/data_parallel_size",
    "/zero_optimization/zenflow",
)


def accelerated(config: Mapping[str, object]) -> dict[str, str]:
    """Return features that need an accelerator, by pointer. Lion has a kernel for the CPU, but only if offloaded."""
    offloaded = lookup(config, "/zero_optimization/offload_optimizer/device") == "cpu"
    found = {}
    for pointer, names in ACCELERATED.items():
        value = lookup(config, pointer)
        if str(value).lower() in names and not (offloaded and str(value).lower() == "lion"):
            shown = f"{name_of(pointer)} {value}" if isinstance(value, str) else name_of(pointer)
            found[pointer] = f"{shown}: DeepSpeed supports it on accelerators only, not on a CPU"
    return found


def without_idle(config: Mapping[str, object]) -> JsonObject:
    """Return a copy without those keys that would break a run."""
    kept = copy.deepcopy(dict(config))
    for pointer in _DROPPED:
        parent, name = pointer.rsplit("/", 1)
        section = lookup(kept, parent) if parent else kept
        if isinstance(section, dict):
            section.pop(name, None)
    if "optimizer" not in kept:
        kept["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW serves offloaded parameters too
    return kept
