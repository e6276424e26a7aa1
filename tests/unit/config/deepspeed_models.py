"""DeepSpeed's own models of the sections that it checks, by their pointers."""

from __future__ import annotations

import importlib
from typing import Any

MODELS = {
    "/zero_optimization": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
    "/zero_optimization/offload_param": "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig",
    "/zero_optimization/offload_optimizer": "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig",
    "/zero_optimization/zenflow": "deepspeed.runtime.zenflow.zenflow_config:ZenFlowConfig",
    "/zero_optimization/leaf_module": "deepspeed.runtime.zero.leaf_module_config:DeepSpeedZeroLeafModuleConfig",
    "/fp16": "deepspeed.runtime.precision_config:DeepSpeedFP16Config",
    "/bf16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "/comms_logger": "deepspeed.comm.config:CommsLoggerConfig",
    "/tensorboard": "deepspeed.monitor.config:TensorBoardConfig",
    "/wandb": "deepspeed.monitor.config:WandbConfig",
    "/csv_monitor": "deepspeed.monitor.config:CSVConfig",
    "/comet": "deepspeed.monitor.config:CometConfig",
    "/compile": "deepspeed.compile.config:CompileConfig",
    "/timers/throughput": "deepspeed.utils.config:DeepSpeedThroughputTimerConfig",
    "/hybrid_engine": "deepspeed.runtime.config:HybridEngineConfig",
    "/tensor_parallel": "deepspeed.runtime.tensor_parallel.config:TPTrainingConfig",
    "/tensor_parallel/tensor_parallel": "deepspeed.runtime.tensor_parallel.config:TPConfig",
    "/weight_quantization": "deepspeed.inference.config:WeightQuantConfig",
}


def attribute(path: str) -> Any:
    """Return what `MODULE:NAME` names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
