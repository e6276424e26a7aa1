"""LAMB (You et al. 2019, Large Batch Optimization for Deep Learning, arXiv 1904.00962): a rate for each layer."""

from __future__ import annotations

from harness.optimizers.optimizer import OptimizerClass, OptimizerType

LAMB = OptimizerType(
    name="Lamb",
    source="deepspeed",
    device=OptimizerClass(
        path="deepspeed.ops.lamb.FusedLamb",
        options=(
            *("lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay"),
            *("max_grad_norm", "max_coeff", "min_coeff", "amsgrad"),
        ),
        compiled=True,
        on_cpu=False,
        refused=("amsgrad",),
    ),
    ranges={"max_coeff": "positive", "min_coeff": "positive"},
    elementwise=False,
    succeeds=("onebitlamb",),
)
