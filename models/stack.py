"""Where a model's decoder layers stand, and which modules around them hold parameters."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from harness.config.errors import UserError
from harness.parallel.adapters import wrappers_in


def find_stack(model: PreTrainedModel) -> str:
    """Name of the ModuleList that holds the decoder layers: the largest that is as long as the model is deep.

    Where none is (a layer may count as two), the largest of all. That its layers are called one after the other is
    seen when the forward runs. UserError if there is none.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0
    }
    if not sizes:
        raise UserError(
            f"model type {model.config.model_type!r} has no list of {depth} decoder layers: it cannot be cut"
        )
    deep = [name for name in sizes if len(list(model.get_submodule(name).children())) == depth]
    return max(deep or sizes, key=lambda name: sizes[name])


def parameter_owners(model: nn.Module, stack: str) -> dict[str, nn.Module]:
    """Name -> module of all modules outside the stack that hold parameters themselves, with all that is in them."""
    owners: dict[str, nn.Module] = {}
    wrapped = wrappers_in(model)
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in (stack, *wrapped, *owners))
        if inside or not (name in wrapped or has_own_parameters(module)):
            continue
        if name == "" or stack.startswith(name + "."):
            parameters = [key for key, _ in module.named_parameters(recurse=False)]
            raise UserError(
                f"{type(module).__name__} holds {parameters} beside its layers, so it cannot be cut into stages"
            )
        owners[name] = module
    return owners


def has_own_parameters(module: nn.Module) -> bool:
    """Whether the module holds a parameter itself, not by a child."""
    return any(True for _ in module.parameters(recurse=False))


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the model's submodule `name`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
