"""Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675)."""

from __future__ import annotations

from harness.optimizers.optimizer import OptimizerClass, OptimizerType

LION = OptimizerType(
    name="Lion",
    source="deepspeed",
    device=OptimizerClass(
        path="deepspeed.ops.lion.FusedLion",
        options=("lr", "betas", "weight_decay", "set_grad_none"),
        compiled=True,
        on_cpu=False,
    ),
    host=OptimizerClass(
        path="deepspeed.ops.lion.DeepSpeedCPULion",
        options=("lr", "betas", "weight_decay", "fp32_optimizer_states"),
        compiled=True,
    ),
    flags={"lion_32bit": ("lr", "betas", "weight_decay")},
    family="Lion",
    states=1,
    tested_with_zero=True,
)
