"""Adam and AdamW (Kingma and Ba 2014, arXiv 1412.6980; Loshchilov and Hutter 2017, arXiv 1711.05101).

DeepSpeed's Adam decays weights as AdamW does, unless `adam_w_mode` is false.
"""

from __future__ import annotations

from harness.optimizers.optimizer import OptimizerClass, OptimizerType

FUSED = OptimizerClass(
    path="deepspeed.ops.adam.fused_adam.FusedAdam",
    options=("lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none"),
    compiled=True,
    on_cpu=False,
    refused=("amsgrad",),
)
HOST = OptimizerClass(
    path="deepspeed.ops.adam.DeepSpeedCPUAdam",
    options=(
        *("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad"),
        *("adamw_mode", "fp32_optimizer_states"),
    ),
    compiled=True,
    set_by_engine=("adamw_mode",),
    refused=("amsgrad",),
)
TORCH_ADAMW = OptimizerClass(
    path="torch.optim.AdamW",
    options=(
        *("lr", "betas", "eps", "weight_decay", "amsgrad"),
        *("maximize", "foreach", "capturable", "differentiable", "fused"),
    ),
)
TORCH_ADAM = OptimizerClass(
    path="torch.optim.Adam",
    options=(
        *("lr", "betas", "eps", "weight_decay", "amsgrad"),
        *("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
    ),
)
ENGINE_OPTIONS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
OF_ARGUMENTS = ("lr", "betas", "eps", "weight_decay")
# an eps so large that rounding in a tiny gradient moves no weight by the whole rate
TRIAL = {"lr": 1.0, "betas": [0.9, 0.95], "eps": 1e-6}

ADAM = OptimizerType(
    name="Adam",
    source="deepspeed",
    device=FUSED,
    host=HOST,
    torch=TORCH_ADAMW,
    coupled=TORCH_ADAM,
    engine_options=ENGINE_OPTIONS,
    family="Adam",
    tested_with_zero=True,
    trial=TRIAL,
)
ADAMW = OptimizerType(
    name="AdamW",
    source="deepspeed",
    device=FUSED,
    host=HOST,
    torch=TORCH_ADAMW,
    engine_options=ENGINE_OPTIONS,
    flags={"adamw_torch": OF_ARGUMENTS, "adamw_torch_fused": OF_ARGUMENTS},
    family="Adam",
    tested_with_zero=True,
    succeeds=("onebitadam", "zerooneadam"),
    trial=TRIAL,
)
