"""Write the DeepSpeed JSON of a layout: a preset that passes `ds-harness check` and trains."""

from __future__ import annotations

import json
from pathlib import Path

from harness.atomic import write_output
from harness.checking import check, refusals
from harness.config.text.diagnostic import ConfigError
from harness.config.text.document import from_text
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.workload import Strategy
from harness.schedules import DEFAULT, SCHEDULES


def preset(strategy: Strategy, precision: str) -> JsonObject:
    """Return the config of a layout; values that come from a run's arguments are "auto"."""
    zero: JsonObject = {"stage": strategy.zero_stage}
    if strategy.zero_stage:
        zero |= {"contiguous_gradients": True, "reduce_bucket_size": int(strategy.bucket)}
    if strategy.zero_stage >= 2:
        zero["overlap_comm"] = True
    if strategy.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": int(0.9 * strategy.bucket),
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    host = {"device": "cpu", "pin_memory": True}
    if strategy.offloads_states:
        zero["offload_optimizer"] = host
    if strategy.offloads_parameters:
        zero["offload_param"] = host
    config: JsonObject = {
        "train_batch_size": strategy.global_batch,
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.accumulation,
        "gradient_clipping": "auto",
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "zero_optimization": zero,
        "pipeline": {"activation_checkpoint_interval": strategy.recompute_every if strategy.recompute == "full" else 0},
    }
    if strategy.offload != "none":
        config["zero_force_ds_cpu_optimizer"] = False
    if strategy.pp_size > 1:
        config["pipeline"] = {
            "stages": strategy.pp_size,
            "partition": strategy.partition,
            **config["pipeline"],
            "use_reentrant": False,
        }
        if strategy.schedule_name != DEFAULT:
            config["pipeline"]["schedule"] = strategy.schedule_name
        if strategy.chunks > 1 and SCHEDULES[strategy.schedule_name].chunks is None:
            config["pipeline"]["chunks_per_stage"] = strategy.chunks
    if strategy.tp_size > 1:
        config["tensor_parallel"] = {"autotp_size": strategy.tp_size}
        if strategy.sequence_parallel:
            config["tensor_parallel"]["sequence_parallel"] = True
    if strategy.ep_size > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": strategy.ep_size}
    return config | _for_length(strategy)


def _for_length(strategy: Strategy) -> JsonObject:
    """Return the config's sections that reduce memory per token."""
    found: JsonObject = {}
    if strategy.cp_size > 1:
        found["context_parallel"] = {"size": strategy.cp_size}
    tiling = {
        "loss": strategy.loss_tile,
        "feed_forward": strategy.block_tile,
        "attention": strategy.attention_tile,
    }
    if any(tiling.values()):
        found["tiling"] = tiling
    if strategy.host_activations:
        found["activation_checkpointing"] = {"cpu_checkpointing": True}
    return found


def write_preset(path: Path, strategy: Strategy, precision: str, model: str) -> None:
    """Write the preset of a layout. Raises UserError if a check refuses it, or if it cannot be written."""
    text = json.dumps(preset(strategy, precision), indent=2) + "\n"
    found = check(from_text(text, str(path)), world_size=strategy.world_size, model=model)
    if refused := refusals(found):
        raise ConfigError(refused[:1])
    try:
        write_output(path, text)
    except OSError as error:
        raise UserError(f"--write {path}: cannot be written: {(error.strerror or '').lower()}") from None
