"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235): second moments of a matrix by its rows and columns."""

from __future__ import annotations

from harness.optimizers.optimizer import OptimizerClass, OptimizerType

ADAFACTOR = OptimizerType(
    name="Adafactor",
    source="torch",
    device=OptimizerClass(
        path="torch.optim.Adafactor",
        options=("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"),
    ),
    ranges={"beta2_decay": "not_positive", "eps": "two_not_negative", "d": "positive"},
    elementwise=False,
)
