"""The optimizer and the learning rate's schedule, where the DeepSpeed JSON leaves them to the arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from harness.arguments import TrainingArguments
from harness.config.values.json_object import JsonObject
from harness.training.engine.muon import NO_TIES, ParameterGroup, muon

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters that are not decayed; transformers' `Trainer.get_decay_parameter_names` has the same."""


def parameter_groups(
    module: nn.Module, weight_decay: float, first_names: Mapping[str, str] = NO_TIES
) -> list[ParameterGroup]:
    """Trainable parameters in two groups: with weight decay and without, chosen by name and module as in HF's Trainer.

    HF decays whatever is no bias and no parameter of a norm, vectors among them (`A_log`, `sinks`). Parameters kept in
    float32 are in groups of their own, as DeepSpeed makes one flat tensor of a group.

    `first_names`: names in `module` of tied parameters -> their names in the first layer that has them, which decide:
    else stages would step on one weight in different ways.
    """
    in_no_layer_norm = set(get_parameter_names(module, [nn.LayerNorm]))
    groups: dict[tuple[bool, bool], ParameterGroup] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_decayed = name in in_no_layer_norm and not NOT_DECAYED.search(first_names.get(name, name).lower())
            key = is_decayed, getattr(parameter, "kept_in_fp32", False)
            group = groups.setdefault(key, {"params": [], "weight_decay": weight_decay if key[0] else 0.0})
            group["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: (not key[0], key[1]))]


def adamw(groups: list[ParameterGroup], args: TrainingArguments) -> Optimizer:
    """torch's AdamW, fused: nothing has to be compiled, on no device."""
    return torch.optim.AdamW(
        groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )


class LateAdagrad(Optimizer):
    """torch's Adagrad, with its state made at the first step.

    torch makes it at once, for parameters that ZeRO then replaces; so DeepSpeed makes a new Adagrad, without groups, on
    which no schedule acts. Takes the arguments of torch.optim.Adagrad.
    """

    def __init__(self, params: list[ParameterGroup], **options: Any) -> None:
        probe = torch.optim.Adagrad([torch.zeros(1)], **options)  # its checks and its defaults
        super().__init__(params, probe.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters that have a gradient; returns what `closure` returned."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter, group["initial_accumulator_value"]) for parameter in parameters]
            adagrad(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["sum"] for state in states],
                [state["step"] for state in states],
                **{key: group[key] for key in ("lr", "weight_decay", "lr_decay", "eps", "maximize")},
            )
        return loss

    def _state_of(self, parameter: torch.Tensor, initial: float) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["sum"] = torch.full_like(parameter, initial, memory_format=torch.preserve_format)
        return state


def own_optimizer(
    config: JsonObject,
    module: nn.Module,
    groups: list[ParameterGroup],
    args: TrainingArguments,
    first_names: Mapping[str, str] = NO_TIES,
) -> Optimizer | None:
    """Return the optimizer that is handed to DeepSpeed; None where DeepSpeed makes the one that `config` names.

    `groups` are the trainable parameters of `module`; `first_names` as for `parameter_groups`.
    """
    section = config.get("optimizer")
    if section is None:
        return adamw(groups, args)
    if section["type"].lower() == "muon":
        return muon(module, groups, section.get("params", {}), first_names)
    zero = config.get("zero_optimization", {})
    offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if section["type"].lower() == "adagrad" and zero.get("stage", 0) > 0 and not offloaded:
        return LateAdagrad(groups, **section.get("params", {}))
    return None


def schedule(args: TrainingArguments, max_steps: int) -> Callable[[Optimizer], LRScheduler]:
    """Make transformers' schedule of that name for an optimizer."""

    def make(optimizer: Optimizer) -> LRScheduler:
        scheduler: LRScheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.warmup(max_steps),
            num_training_steps=max_steps,
        )
        return scheduler

    return make
