"""The other classes of torch.optim, of which nothing is known but their options."""

from __future__ import annotations

from harness.optimizers.optimizer import OptimizerClass, OptimizerType

ADADELTA = OptimizerType(
    name="Adadelta",
    source="torch",
    device=OptimizerClass(
        path="torch.optim.Adadelta",
        options=("lr", "rho", "eps", "weight_decay", "foreach", "capturable", "maximize", "differentiable"),
    ),
    ranges={"rho": "decay"},
)
ADAMAX = OptimizerType(
    name="Adamax",
    source="torch",
    device=OptimizerClass(
        path="torch.optim.Adamax",
        options=("lr", "betas", "eps", "weight_decay", "foreach", "maximize", "differentiable", "capturable"),
    ),
)
ASGD = OptimizerType(
    name="ASGD",
    source="torch",
    device=OptimizerClass(
        path="torch.optim.ASGD",
        options=(
            *("lr", "lambd", "alpha", "t0", "weight_decay"),
            *("foreach", "maximize", "differentiable", "capturable"),
        ),
    ),
    ranges={"lambd": "not_negative", "alpha": "share", "t0": "not_negative"},
)
LBFGS = OptimizerType(
    name="LBFGS",
    source="torch",
    device=OptimizerClass(
        path="torch.optim.LBFGS",
        options=(
            *("lr", "max_iter", "max_eval", "tolerance_grad", "tolerance_change"),
            *("history_size", "line_search_fn"),
        ),
    ),
    ranges={
        "max_iter": "count",
        "max_eval": "count",
        "history_size": "count",
        "tolerance_grad": "not_negative",
        "tolerance_change": "not_negative",
    },
    cannot_train="it needs a closure that calls the model, which DeepSpeed does not give it",
)
NADAM = OptimizerType(
    name="NAdam",
    source="torch",
    device=OptimizerClass(
        path="torch.optim.NAdam",
        options=(
            *("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay"),
            *("foreach", "maximize", "capturable", "differentiable"),
        ),
    ),
    ranges={"momentum_decay": "not_negative"},
)
RADAM = OptimizerType(
    name="RAdam",
    source="torch",
    device=OptimizerClass(
        path="torch.optim.RAdam",
        options=(
            *("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"),
            *("foreach", "maximize", "capturable", "differentiable"),
        ),
    ),
)
RPROP = OptimizerType(
    name="Rprop",
    source="torch",
    device=OptimizerClass(
        path="torch.optim.Rprop",
        options=("lr", "etas", "step_sizes", "capturable", "foreach", "maximize", "differentiable"),
    ),
    ranges={"etas": "two_positive", "step_sizes": "two_positive"},
)
SPARSE_ADAM = OptimizerType(
    name="SparseAdam",
    source="torch",
    device=OptimizerClass(path="torch.optim.SparseAdam", options=("lr", "betas", "eps", "maximize")),
    cannot_train="it needs sparse gradients, but the model's are dense",
)
