"""Adagrad (Duchi et al. 2011, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization)."""

from __future__ import annotations

from harness.optimizers.optimizer import OptimizerClass, OptimizerType

ADAGRAD = OptimizerType(
    name="Adagrad",
    source="deepspeed",
    device=OptimizerClass(
        path="torch.optim.Adagrad",
        options=(
            *("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
            *("foreach", "maximize", "differentiable", "fused"),
        ),
    ),
    host=OptimizerClass(
        path="deepspeed.ops.adagrad.DeepSpeedCPUAdagrad",
        options=("lr", "eps", "weight_decay", "amsgrad", "fp32_optimizer_states"),
        compiled=True,
    ),
    made_by="harness.training.engine.optimizer:adagrad",
    ranges={"lr_decay": "not_negative", "initial_accumulator_value": "not_negative"},
    flags={"adagrad": ("lr", "weight_decay")},
    states=1,
    tested_with_zero=True,
    trial={"lr": 3.0, "eps": 1e-6},
)
