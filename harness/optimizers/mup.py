"""The optimizers of the package mup (Yang et al. 2022, Tensor Programs V, arXiv 2203.03466)."""

from __future__ import annotations

from harness.optimizers.optimizer import OptimizerClass, OptimizerType

MUADAM, MUADAMW, MUSGD = (
    OptimizerType(
        name=name,
        source="deepspeed",
        device=OptimizerClass(path=f"mup.{name}", options=None),
        package="mup",
    )
    for name in ("MuAdam", "MuAdamW", "MuSGD")
)
