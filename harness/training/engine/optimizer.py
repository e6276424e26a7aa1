"""Make the optimizer and the learning-rate schedule for DeepSpeed's engine."""

from __future__ import annotations

import copy
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad as step_of_adagrad
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from harness.arguments import TrainingArguments
from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup
from harness.deepspeed.expert_groups import EXPERT_GROUP, is_expert
from harness.deepspeed.zero3_parameters import unpartitioned_shape
from harness.errors import UserError
from harness.optimizers import DEFAULT, OptimizerType, find
from harness.topology.env import inherited
from harness.topology.groups import Groups

ParameterGroup: TypeAlias = dict[str, Any]
"""A parameter group of torch's optimizers: `params`, and options by name."""
NO_TIES: Mapping[str, str] = MappingProxyType({})
"""The `first_names` of a module without tied parameters."""
NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Parameters without weight decay, as in transformers' `Trainer.get_decay_parameter_names`."""


@runtime_checkable
class NeedsEngine(Protocol):
    """An optimizer that has to know which parameters lie in the flat tensors that ZeRO gives it."""

    def attach(self, engine: DeepSpeedEngine, groups: Groups) -> None:
        """Read them from the engine that has been built around this optimizer; all ranks call it."""


class GivenOptimizer(Protocol):
    """The optimizer and the scheduler of `Trainer(optimizers=...)`, for the parameters that a rank trains."""

    @property
    def scheduler(self) -> LRScheduler | None:
        """The user's scheduler; None for the arguments' schedule."""

    @property
    def name(self) -> str:
        """The name of the optimizer's class."""

    @property
    def summary(self) -> str:
        """The optimizer and scheduler in words, for messages."""

    @property
    def hyperparameters(self) -> JsonObject:
        """Options of the groups and of the scheduler that JSON can represent."""

    @property
    def description(self) -> str:
        """Class, options and groups as text, which must be equal on all ranks."""

    def groups(self, module: nn.Module, first_names: Mapping[str, str]) -> list[ParameterGroup]:
        """Return the trained parameters of `module` in the user's groups; `first_names` as in `parameter_groups`."""

    def made_for(self, groups: list[ParameterGroup]) -> Optimizer:
        """Return an optimizer of the same class and settings for these groups."""

    def schedule(self, own: Callable[[Optimizer], LRScheduler]) -> Callable[[Optimizer], object]:
        """Return a function that makes the schedule of the run's optimizer; `own` makes the arguments' schedule."""


@runtime_checkable
class GivenSchedule(Protocol):
    """The schedule of a `GivenOptimizer`."""

    @property
    def first_learning_rate(self) -> float:
        """The learning rate of the user's first group."""


def parameter_groups(
    module: nn.Module, weight_decay: float, first_names: Mapping[str, str] = NO_TIES
) -> list[ParameterGroup]:
    """Return the trainable parameters in groups with and without weight decay, chosen as in HF's Trainer.

    Args:
        first_names: name of a tied parameter in `module` -> its name in the first layer that holds it. The first name
            decides, so that all stages update their copies of a weight alike.
    """
    in_no_layer_norm = set(get_parameter_names(module, [nn.LayerNorm]))

    def group(name: str) -> tuple[int, ParameterGroup]:
        # HF decays all parameters except biases and norms, including vectors such as `A_log` and `sinks`.
        is_decayed = name in in_no_layer_norm and not NOT_DECAYED.search(first_names.get(name, name).lower())
        return int(not is_decayed), {"weight_decay": weight_decay if is_decayed else 0.0}

    return grouped(module, group)


def grouped(module: nn.Module, group: Callable[[str], tuple[int, ParameterGroup]]) -> list[ParameterGroup]:
    """Return the trainable parameters in groups, with further groups for float32 parameters and distributed experts.

    Args:
        group: returns the index of a parameter's group, and the options of that group, by the name in `module`.
    """
    groups: dict[tuple[int, bool, bool], ParameterGroup] = {}
    # Parameters with a multiple of 8 elements come first, so that each of them starts at a multiple of 16 bytes, even
    # in 16 bits. A GPU's grouped products of experts need that. Other parameters, such as `sinks`, are few and small.
    # The sort is stable, so ranks with the same layers flatten their parameters in the same order.
    ordered = sorted(module.named_parameters(), key=lambda named: prod(unpartitioned_shape(named[1])) % 8 > 0)
    for name, parameter in ordered:
        if parameter.requires_grad:
            index, options = group(name)
            # DeepSpeed flattens a group into one tensor of one dtype, and reduces it over one process group.
            key = index, getattr(parameter, "kept_in_fp32", False), is_expert(parameter)
            made = groups.setdefault(key, {"params": [], **options, **(EXPERT_GROUP if key[2] else {})})
            made["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def in_buckets(groups: list[ParameterGroup], size: int) -> list[ParameterGroup]:
    """Split parameter groups into groups of about `size` elements; a larger parameter forms its own group."""
    found: list[ParameterGroup] = []
    for group in groups:
        # As if a bucket were full: the first parameter opens one.
        elements = size
        for parameter in group["params"]:
            if elements + parameter.numel() > size:
                found.append({**group, "params": []})
                elements = 0
            found[-1]["params"].append(parameter)
            elements += parameter.numel()
    return found


class LateAdagrad(Optimizer):
    """torch's Adagrad with its state created at the first step, as in other optimizers.

    torch 2.11 creates it in the constructor, before ZeRO replaces the parameters. DeepSpeed therefore makes a new
    Adagrad without groups, which no schedule changes. Without ZeRO, checkpoints would differ from later torch
    versions'. Takes the arguments of torch.optim.Adagrad.
    """

    def __init__(self, params: list[ParameterGroup], **options: Any) -> None:
        # Only for torch's checks of the options, and its defaults.
        probe = torch.optim.Adagrad([torch.zeros(1)], **options)
        super().__init__(params, probe.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters with a gradient; return the result of `closure`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter, group["initial_accumulator_value"]) for parameter in parameters]
            step_of_adagrad(
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


def names_of(module: nn.Module, first_names: Mapping[str, str] = NO_TIES) -> dict[Tensor, str]:
    """Return parameter of `module` -> its name, or the first name of a tied one, as in `parameter_groups`."""
    return {parameter: first_names.get(name, name) for name, parameter in module.named_parameters()}


def adagrad(groups: list[ParameterGroup], options: JsonObject, _names: Mapping[Tensor, str]) -> LateAdagrad:
    """Return torch's Adagrad without DeepSpeed's options that have no effect in float32."""
    return LateAdagrad(groups, **{k: v for k, v in options.items() if k not in ("amsgrad", "fp32_optimizer_states")})


def makes_torchs_class(config: JsonObject, device: torch.device) -> bool:
    """Return whether torch's fused class replaces DeepSpeed's, which nvcc and ninja compile at its first use."""
    optimizer = _named(config)
    if optimizer is None or optimizer.torch is None:
        return False
    # torch's class cannot switch it off.
    if not _options(config).get("bias_correction", True):
        return device.type == "cpu"
    # For states offloaded from a GPU to the host, DeepSpeed's CPU class is several times as fast, if compiled.
    return device.type == "cpu" or not _offloads_states(config) or bool(_missing(("c++", "ninja")))


def compiled_optimizer(config: JsonObject, device: torch.device) -> str | None:
    """Return the name of the run's optimizer if DeepSpeed compiles it at its first use, else None.

    Raises UserError if a program needed to compile it, or a package that makes it, is not installed.
    """
    optimizer = _named(config)
    if optimizer is not None and optimizer.made_by:
        _maker(optimizer)
    if optimizer is None or device.type == "cpu" or makes_torchs_class(config, device):
        return None
    if not optimizer.class_of({}, offloaded=_offloads_states(config)).compiled:
        return None
    name = config["optimizer"]["type"]
    by_cpu_compiler = _offloads_states(config) or device.type != "cuda" or torch.version.hip
    needed = ("c++", "ninja") if by_cpu_compiler else ("nvcc", "ninja")
    if missing := _missing(needed):
        raise UserError(
            f"optimizer {name} is compiled by DeepSpeed when it is first used: install {' and '.join(missing)}, or use "
            f"{DEFAULT.name}, which needs neither"
        )
    return str(name)


def _named(config: JsonObject) -> OptimizerType | None:
    return find(str(lookup(config, "/optimizer/type")))


def _options(config: JsonObject) -> JsonObject:
    return dict(config["optimizer"].get("params") or {})


def _offloads_states(config: JsonObject) -> bool:
    return lookup(config, "/zero_optimization/offload_optimizer/device") not in (None, "none")


def _missing(programs: Sequence[str]) -> list[str]:
    environment = inherited()
    # Where torch's cpp_extension, which compiles DeepSpeed's operators, looks for compilers.
    homes = [environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda"]
    places = os.pathsep.join([environment.get("PATH", ""), *(f"{home}/bin" for home in homes)])
    names = {each: environment.get("CXX", each) if each == "c++" else each for each in programs}
    return [each for each, name in names.items() if not shutil.which(name, path=places)]


def torchs_options(params: JsonObject) -> JsonObject:
    """Convert options for DeepSpeed's class into options with which DeepSpeed uses torch's fused class."""
    # torch's class lacks these options of DeepSpeed's, and refuses `fused` together with `foreach`.
    left_out = ("bias_correction", "set_grad_none", "torch_adam")
    kept = {key: value for key, value in params.items() if key not in left_out}
    return {"torch_adam": True, **({} if kept.get("foreach") else {"fused": True}), **kept}


def own_optimizer(
    config: JsonObject,
    module: nn.Module,
    groups: list[ParameterGroup],
    args: TrainingArguments,
    device: torch.device,
    first_names: Mapping[str, str] = NO_TIES,
) -> Optimizer | None:
    """Return the optimizer to pass to DeepSpeed; None if DeepSpeed itself makes the optimizer of `config`.

    `groups` are the trainable parameters of `module`, which runs on `device`; `first_names` as in `parameter_groups`.
    """
    if config.get("optimizer") is None:
        # torch's fused AdamW, which, unlike DeepSpeed's, needs no compilation on any device.
        return torch.optim.AdamW(
            groups,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            fused=True,
        )
    optimizer = _named(config)
    if optimizer is None or not made_here(config, device):
        return None
    if optimizer.made_by:
        made: Optimizer = _maker(optimizer)(groups, _options(config), names_of(module, first_names))
    else:
        made = resolve_name(optimizer.device.path)(groups, **_options(config))
    return made


def _maker(optimizer: OptimizerType) -> Callable[..., Optimizer]:
    """Return the function that makes an optimizer. UserError if a package that it needs is not installed."""
    try:
        maker: Callable[..., Optimizer] = resolve_name(optimizer.made_by)
    except ModuleNotFoundError as error:
        raise UserError(
            f"optimizer {optimizer.name} needs {error.name}, which is not installed: use another optimizer"
        ) from error
    return maker


def made_here(config: JsonObject, device: torch.device) -> bool:
    """Return whether the harness, not DeepSpeed, makes the optimizer that `config` names."""
    optimizer = _named(config)
    if optimizer is None or (optimizer.source != "harness" and not optimizer.made_by):
        return False
    # For states offloaded from a GPU, DeepSpeed compiles its own class for the host; on a CPU that gains nothing.
    return device.type == "cpu" or optimizer.host is None or not _offloads_states(config)


def learning_rate_schedule(args: TrainingArguments, max_steps: int) -> Callable[[Optimizer], LRScheduler]:
    """Return a function that makes transformers' schedule `args.lr_scheduler_type` for an optimizer."""

    options = args.lr_scheduler_kwargs
    assert not isinstance(options, str)

    def make(optimizer: Optimizer) -> LRScheduler:
        try:
            scheduler: LRScheduler = get_scheduler(
                args.lr_scheduler_type,
                optimizer,
                num_warmup_steps=args.warmup(max_steps),
                num_training_steps=max_steps,
                scheduler_specific_kwargs=dict(options or {}),
            )
        # Values that do not fit the optimizer's learning rate.
        except ValueError as error:
            raise UserError(f"--lr_scheduler_type {args.lr_scheduler_type}: {error}") from error
        return scheduler

    return make


class SchedulePosition:
    """Keeps the initial schedule and parameter-group options, so that the schedule can jump to any step."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        scheduler = engine.lr_scheduler
        # Copies, as schedules change their state and the groups in place, and `go_to` always starts from these values.
        self._schedule = copy.deepcopy(scheduler.state_dict()) if scheduler is not None else None
        groups = engine.optimizer.param_groups
        self._groups = [copy.deepcopy({key: group[key] for key in group if key != "params"}) for group in groups]

    def go_to(self, steps: int) -> None:
        """Set the schedule to its state after `steps` steps that updated the weights."""
        scheduler = self._engine.lr_scheduler
        # A resumed run uses its own learning rate, betas and weight decay, not the checkpoint's.
        for group, built in zip(self._engine.optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(built))
        if scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(self._schedule))
        if scheduler is not None and steps:
            advance_schedule(scheduler, steps, self._engine.train_batch_size())


def advance_schedule(scheduler: Any, steps: int, train_batch: int) -> None:
    """Advance a newly built schedule to its state after `steps` steps."""
    with warnings.catch_warnings():
        # torch warns of scheduler steps without optimizer steps.
        warnings.simplefilter("ignore")
        # A function of the step alone.
        if isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = steps - 1
            scheduler._step_count = steps  # noqa: SLF001  # else `step` warns, as at its first call
            scheduler.step()
        # DeepSpeed's schedules are functions of the step too, but count from 0.
        elif hasattr(scheduler, "last_batch_iteration"):
            scheduler.step(steps - 1)
        else:
            for _ in range(steps):
                # DeepSpeed passes the batch size where ReduceLROnPlateau expects a loss: do the same.
                scheduler.step(*([train_batch] if isinstance(scheduler, ReduceLROnPlateau) else []))
