"""Run a block's shared expert while tokens travel to its routed experts.

In many families a block calls its shared expert after the routed experts, with the block's own input. A copy of the
block on the meta device finds such modules. They then run between sending the tokens and their arrival, and return that
output when the block calls them later. So each module runs once, on the same input as otherwise.

Not on a CPU, whose cores both compute and move the tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

WITHOUT_GAIN = {"cpu"}
"""Kinds of devices on which nothing runs early."""


class EarlyModules:
    """The modules of one block that run early."""

    def __init__(self, block: nn.Module, experts: nn.Module, width: int) -> None:
        after = _called_after(block, experts, width)
        self._dims = {block.get_submodule(name): dims for name, dims in after.items()}
        self._input: Tensor | None = None
        self._made: dict[nn.Module, Tensor] = {}
        for module in self._dims:
            kind = type(module)
            methods = {"forward": _taking(kind, self._made), "__module__": kind.__module__}
            module.__class__ = type(kind.__name__, (kind,), methods)
        if self._dims:
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave)

    def run(self) -> None:
        """Run the modules on the input of the block; called while tokens travel."""
        given = self._input
        if given is not None and given.device.type not in WITHOUT_GAIN:
            for module, dims in self._dims.items():
                self._made[module] = module(given.flatten(0, 1) if dims == 2 else given)

    def _enter(self, _block: nn.Module, args: tuple[object, ...]) -> None:
        self._input = args[0] if args and isinstance(args[0], Tensor) else None

    def _leave(self, _block: nn.Module, _args: object, _output: object) -> None:
        self._input = None
        self._made.clear()


def _taking(kind: type[nn.Module], made: dict[nn.Module, Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return a forward that pops the precomputed output from `made`, or else runs the module."""

    def forward(self: nn.Module, given: Tensor) -> Tensor:
        found = made.pop(self, None)
        output: Tensor = kind.forward(self, given) if found is None else found
        return output

    return forward


def _called_after(block: nn.Module, experts: nn.Module, width: int) -> dict[str, int]:
    """Return the names of the modules that `block` calls after its experts with only the block's input.

    The value is the number of dimensions of that input: 3 for [batch, sequence, width], 2 for [tokens, width]. Empty if
    the block does not run on the meta device.
    """
    names = {name for name, child in block.named_children() if child is not experts and _is_plain(child)}
    own = next(name for name, child in block.named_modules() if child is experts)
    trial = copy.deepcopy(block).to("meta")
    given = torch.empty(1, 2, width, device="meta", dtype=next(trial.parameters()).dtype)
    found: dict[str, int] = {}
    ran: list[bool] = []

    def run_experts(hidden: Tensor, *_routing: object, **_named: object) -> Tensor:
        ran.append(True)
        return torch.empty_like(hidden)

    def see(name: str, _module: nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
        alone = len(args) == 1 and not named
        if ran and alone and isinstance(args[0], Tensor) and _is_whole(args[0], given):
            found[name] = args[0].ndim

    vars(trial.get_submodule(own))["forward"] = run_experts
    for name in names:
        trial.get_submodule(name).register_forward_pre_hook(partial(see, name), with_kwargs=True)
    try:
        with torch.no_grad():
            trial(given)
    except Exception:  # the block takes more inputs, or reads values: none of it runs early
        return {}
    return found


def _is_whole(view: Tensor, given: Tensor) -> bool:
    """Return whether `view` has all elements of `given`, perhaps with batch and sequence flattened.

    Compares storages, because tensors on the meta device have no addresses.
    """
    same = view.untyped_storage()._cdata == given.untyped_storage()._cdata  # noqa: SLF001  # what torch compares, too
    return same and view.numel() == given.numel() and view.shape[-1] == given.shape[-1]


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module computes the same at any time: no dropout, and no hook on its output."""
    draws = any(isinstance(part, _DropoutNd) and part.p > 0 for part in module.modules())
    return not draws and not module._forward_hooks  # noqa: SLF001  # torch has no public way to ask
