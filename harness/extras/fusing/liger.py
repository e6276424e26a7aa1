"""Use liger-kernel's kernels in a model's norms, dense feed-forward blocks and rotary embedding.

Liger patches a model by family. Here it patches a copy of the model without weights, and these patches are applied to
the layers that a rank builds. So layers may be sharded, and no other model in the process changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from harness.device.kernels import interpreted
from harness.errors import UserError
from harness.extras.fusing.fused import reads_globals, with_globals
from harness.hf.skeleton import build_skeleton

FLAG = "--use_liger_kernel"
NOT_THE_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Options of Liger that leave out its loss: the harness computes the loss itself, in every layout."""


@dataclass(frozen=True)
class FusedModule:
    """A change to a module: a new forward and the attributes it reads."""

    forward: Callable[..., Any]
    attributes: Mapping[str, object]

    def put_into(self, module: nn.Module) -> None:
        for name, value in self.attributes.items():
            setattr(module, name, value)
        module.forward = MethodType(self.forward, module)


@dataclass(frozen=True)
class LigerKernels:
    """The changes that Liger makes to a model, by the names of its modules."""

    modules: Mapping[str, FusedModule]

    def put_into(self, layer: nn.Module) -> None:
        """Change the modules of a pipeline layer, which have their names in the model."""
        for name, module in layer.named_modules():
            if name in self.modules:
                self.modules[name].put_into(module)

    def put_where_free(self, layer: nn.Module) -> None:
        """Change the modules whose forward is still their class's."""
        for name, module in layer.named_modules():
            if name in self.modules and "forward" not in vars(module):
                self.modules[name].put_into(module)


def liger_kernels(config: PretrainedConfig, device: torch.device) -> LigerKernels:
    """Return the changes that Liger makes to the model of `config`. Raises UserError if there are none, and why."""
    found = find_kernels(config, device)
    if isinstance(found, str):
        raise UserError(f"{FLAG}: {found}: omit the flag")
    return found


def find_kernels(config: PretrainedConfig, device: torch.device) -> LigerKernels | str:
    """Return the changes that Liger makes to the model of `config`, or the reason why there are none.

    There are none if the package or a GPU is missing, or Liger does not support the family.
    """
    has_device = device.type != "cpu" or interpreted()
    if not has_device or find_spec("liger_kernel") is None:
        return "needs a GPU and the package liger-kernel (pip install liger-kernel), and one of the two is missing here"
    liger = import_module("liger_kernel.transformers.monkey_patch")
    family = config.model_type
    if family not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"Liger has no kernels for model type {family!r}"
    model = build_skeleton(config)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    home = sys.modules[type(model).__module__]
    names = dict(vars(home))
    try:
        liger._apply_liger_kernel_to_instance(model, **NOT_THE_LOSS)  # noqa: SLF001  # as HuggingFace's Trainer does
    except Exception as error:  # Liger's code for a family fits only some versions of transformers
        return f"Liger cannot change model type {family!r}: {error}"
    finally:
        kernels = _taken_back(home, names)
    changed = {name: _changes(module, before[name]) for name, module in model.named_modules() if _taken(module)}
    made: dict[FunctionType, FusedModule] = {}  # layers that are alike share what is compiled if they share a forward
    for name, module in model.named_modules():
        forward: Callable[..., Any] = type(module).forward
        if "forward" not in vars(module) and reads_globals(forward, kernels):
            if forward not in made:
                made[forward] = FusedModule(forward=with_globals(forward, kernels), attributes={})
            changed[name] = made[forward]
    return LigerKernels(changed) if changed else f"Liger changes nothing of model type {family!r} but its loss"


def _taken(module: nn.Module) -> bool:
    """Return whether to use Liger's forward. A module with its own matrices (experts) may be sharded and keeps ours."""
    return "forward" in vars(module) and all(own.dim() < 2 for own in module.parameters(recurse=False))


def _changes(module: nn.Module, before: set[str]) -> FusedModule:
    """Return the attributes that Liger has set on a module."""
    added = {name: value for name, value in vars(module).items() if name not in before}
    return FusedModule(
        forward=added["forward"].__func__,
        attributes={name: value for name, value in added.items() if not isinstance(value, MethodType)},
    )


def _taken_back(home: ModuleType, names: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Restore the functions and classes of a family's file that Liger replaced; return Liger's functions by name.

    For tensors without values they call the original, because the harness also runs forwards on the meta device.
    """
    kernels: dict[str, Callable[..., Any]] = {}
    for name, old in names.items():
        new = getattr(home, name)
        if new is old:
            continue
        if not isinstance(new, type) and callable(new) and callable(old):
            kernels[name] = _where_there_are_values(new, old)
        setattr(home, name, old)
    return kernels


def _where_there_are_values(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def either(first: Tensor, *args: object, **kwargs: object) -> Any:
        on_device = first.device.type not in ("meta", "cpu") or (first.device.type == "cpu" and interpreted())
        return (kernel if type(first) is Tensor and on_device else plain)(first, *args, **kwargs)

    return either
