"""Find a model's decoder layers, and the modules around them that hold parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from harness.errors import UserError
from harness.hf.layers.dry_run import CANNOT_RUN
from harness.parallel.plans.lora import wrappers_in


def find_stack(model: PreTrainedModel) -> str:
    """Return the name of the ModuleList that holds the decoder layers of a model on the meta device.

    It is a list as long as the model is deep, or any list where none is (a layer may count as two). A list inside
    another one's layer is not looked at (its two attentions, say). Of several, it is the one whose layers the forward
    calls first when it gets token ids alone (an encoder of images is not called then), else the largest. That its
    layers are called one after the other is seen when the forward runs. Raises UserError if there is none.
    """
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in sizes):
            size = sum(parameter.numel() for parameter in module.parameters())
            sizes |= {name: size} if size else {}
    if not sizes:
        raise UserError(
            f"model type {model.config.model_type!r} has no list of decoder layers, so it cannot be split into stages"
        )
    deep = [name for name in sizes if len(list(model.get_submodule(name).children())) == depth] or list(sizes)
    called = _first_called(model, deep) if len(deep) > 1 else None
    return called or max(deep, key=lambda name: sizes[name])


class _Called(Exception):
    """Ends a forward that has come to a layer of the list `name`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@torch.no_grad()
def _first_called(model: PreTrainedModel, lists: Iterable[str]) -> str | None:
    """Return the name of the list whose layer is called first; None where the forward does not get there on meta."""

    def stop(name: str, *_: object) -> None:
        raise _Called(name)

    layers = [(name, layer) for name in lists for layer in model.get_submodule(name).children()]
    handles = [layer.register_forward_pre_hook(partial(stop, name)) for name, layer in layers]
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    try:
        for mask in (None, ids.new_ones(1, 1, 8, 8, dtype=torch.bool)):  # to make one, some look at values
            with suppress(*CANNOT_RUN):
                model(input_ids=ids, attention_mask=mask, use_cache=False)
    except _Called as called:
        return called.name
    finally:
        for handle in handles:
            handle.remove()
    return None


def parameter_owners(model: nn.Module, stack: str) -> dict[str, nn.Module]:
    """Return name -> module of all modules outside the stack that hold parameters themselves.

    A module inside of such a one is not listed: it comes with it.
    """
    owners: dict[str, nn.Module] = {}
    wrapped = wrappers_in(model)
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in (stack, *wrapped, *owners))
        if inside or not (name in wrapped or has_own_parameters(module)):
            continue
        if name == "" or stack.startswith(name + "."):
            parameters = [key for key, _ in module.named_parameters(recurse=False)]
            raise UserError(
                f"{type(module).__name__} has {parameters} beside its layers, so it cannot be split into stages"
            )
        owners[name] = module
    return owners


def has_own_parameters(module: nn.Module) -> bool:
    """Return whether the module holds a parameter itself, not by a child."""
    return any(True for _ in module.parameters(recurse=False))


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the model's submodule `name`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
