"""Layers wrapped in adapters: the wrappers and the layer inside.

A wrapper is any module with the layer as `base_layer` and with `lora_A` and `lora_B` by adapter name, as in peft. A
wrapper around fused experts adapts only the parameter in its `parameter_name`, so several wrappers are nested. Its A
[experts x r, in] and B [out, r x experts] hold the adapters of all experts.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import nn

Wrapper: TypeAlias = Any
"""A peft layer with adapters around another layer, which may be a wrapper too."""


def is_wrapper(module: nn.Module) -> bool:
    return {"base_layer", "lora_A"} <= {name for name, _ in module.named_children()}


def without_adapters(module: nn.Module) -> nn.Module:
    """Return the layer inside all wrappers, or the module itself."""
    while is_wrapper(module):
        module = module.get_submodule("base_layer")
    return module


def wrappers_in(module: nn.Module) -> dict[str, list[Wrapper]]:
    """Return layer name -> wrappers, outermost first, for all layers with adapters in `module`."""
    found: dict[str, list[Wrapper]] = {}
    for name, child in module.named_modules():
        if is_wrapper(child):
            found.setdefault(name.replace(".base_layer", ""), []).append(child)
    return found
