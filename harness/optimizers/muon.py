"""Muon (Jordan et al. 2024): orthogonalised momentum for matrices, and two moments for other parameters."""

from __future__ import annotations

from harness.optimizers.adam import ENGINE_OPTIONS
from harness.optimizers.optimizer import OptimizerClass, OptimizerType

MUON = OptimizerType(
    name="Muon",
    source="deepspeed",
    device=OptimizerClass(
        path="deepspeed.runtime.zero.muon.original_muon.MuonWithAuxAdam",
        options=(
            *("lr", "momentum", "weight_decay", "ns_method", "muon_lr"),
            *("betas", "eps", "adam_lr", "per_head_muon"),
        ),
    ),
    made_by="harness.extras.muon.momentum:muon",
    engine_options=ENGINE_OPTIONS,
    ranges={"muon_lr": "not_negative", "adam_lr": "not_negative"},
    states=1,
    other_states=2,
    tested_with_zero=True,
    elementwise=False,
    sets_groups=True,
)
