"""RMSprop (Hinton 2012, lecture 6e of Neural Networks for Machine Learning)."""

from __future__ import annotations

from harness.optimizers.optimizer import OptimizerClass, OptimizerType

RMSPROP = OptimizerType(
    name="RMSprop",
    source="torch",
    device=OptimizerClass(
        path="torch.optim.RMSprop",
        options=(
            *("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
            *("capturable", "foreach", "maximize", "differentiable"),
        ),
    ),
    ranges={"alpha": "share"},
    flags={"rmsprop": ("lr", "weight_decay")},
    states=1,
    more_states=("momentum", "centered"),
    trial={"lr": 0.3, "eps": 1e-6},
)
