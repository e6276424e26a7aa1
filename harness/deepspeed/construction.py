"""Differences from DeepSpeed in the construction of the harness's engines."""

from __future__ import annotations

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.optim import Optimizer

from harness.deepspeed.expert_groups import is_expert
from harness.deepspeed.flat_optimizer import Averaging, FlatOptimizer
from harness.deepspeed.flat_tensors import EngineOptimizer
from harness.deepspeed.kept_in_fp32 import is_kept


class ConstructedEngine(DeepSpeedEngine):
    """Overrides steps of DeepSpeed's constructor for both engines."""

    def _configure_distributed_model(self, model: nn.Module) -> None:
        super()._configure_distributed_model(model)
        # DeepSpeed recognises only its own MoE classes, and would average the gradients of experts over ranks that hold
        # other experts. Its optimizers read this next.
        if any(is_expert(p) and p.requires_grad for p in self.module.parameters()):
            self.has_moe_layers = True

    def _cast_module_mixed_precision(self, *args: object, **kwargs: object) -> None:
        # DeepSpeed casts all parameters of a module at once. Kept ones then get back their float32 tensors, not casts
        # of the casts, which would have lost the lower bits.
        kept = [(p, p.data) for p in self.module.parameters() if is_kept(p)]
        super()._cast_module_mixed_precision(*args, **kwargs)
        for parameter, data in kept:
            parameter.data = data

    def _configure_bf16_optimizer(self, optimizer: Optimizer) -> EngineOptimizer:
        return self._flat_optimizer(optimizer, self.get_data_types()[1])

    def _configure_zero_optimizer(self, optimizer: Optimizer) -> EngineOptimizer:
        # DeepSpeed routes only bf16 to `_configure_bf16_optimizer`: float32 at stage 1 is caught here.
        plain = self.zero_optimization_stage() == 1 and self.get_data_types() == (torch.float32, torch.float32)
        # FlatOptimizer has neither offloading nor ZenFlow, and `StagedEngine` always computes the norm.
        if plain and not self.zero_cpu_offload() and not self.zenflow and self.zero_compute_grad_norm():
            return self._flat_optimizer(optimizer, torch.float32)
        return super()._configure_zero_optimizer(optimizer)

    def _flat_optimizer(self, optimizer: Optimizer, sums: torch.dtype) -> FlatOptimizer:
        ranks = self.dp_world_size
        # By default, gradients are reduced over ranks in the dtype in which they were accumulated over micro-batches.
        # DeepSpeed's default would round the sums to bf16, even on a single rank.
        dtype = self._config.communication_data_type
        before = 1.0 / ranks if not self.postscale_gradients() else 1.0 / self.gradient_predivide_factor()
        return FlatOptimizer(
            optimizer,
            self.param_names,
            Averaging(ranks=ranks, dtype=dtype, before=before),
            mpu=self.mpu,
            dp_process_group=self.seq_data_parallel_group,
            grad_acc_dtype=sums,
            has_moe_layers=self.has_moe_layers,
        )
