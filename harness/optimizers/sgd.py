"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

from harness.optimizers.optimizer import OptimizerClass, OptimizerType

SGD = OptimizerType(
    name="SGD",
    source="torch",
    device=OptimizerClass(
        path="torch.optim.SGD",
        options=(
            *("lr", "momentum", "dampening", "weight_decay", "nesterov"),
            *("maximize", "foreach", "differentiable", "fused"),
        ),
    ),
    ranges={"dampening": "share"},
    flags={"sgd": ("lr", "weight_decay")},
    states=0,
    more_states=("momentum",),
    trial={"lr": 30.0, "momentum": 0.9},
)
