"""Let modules change their inputs in place under ZeRO-3.

Router jitter multiplies what the router's module is given, in place. ZeRO-3 gives every module a backward hook, and
torch then refuses that, as what the module is given is a view that the hook has made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_map

R = TypeVar("R")
HOOKED = "BackwardHookFunctionBackward"
"""The name of the node that a backward hook puts before a module."""


def copy_hooked_inputs(model: nn.Module) -> None:
    """Have every module below `model` run on copies of inputs that a backward hook has made views.

    torch's own modules are left out: they do not change their inputs, and they are most of a model.
    """
    for module in model.modules():
        if module is not model and not type(module).__module__.startswith("torch.nn."):
            module.forward = partial(_on_copies, module.forward)


def _on_copies(forward: Callable[..., R], *args: object, **kwargs: object) -> R:
    args, kwargs = tree_map(_copied, (args, kwargs))
    return forward(*args, **kwargs)


def _copied(value: object) -> object:
    if isinstance(value, Tensor) and type(value.grad_fn).__name__ == HOOKED:
        return value.clone()
    return value
