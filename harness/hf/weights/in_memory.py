"""A model that is already in memory: what of it can be trained as it is, and its copy on the meta device.

Its own modules become the pipeline layers, so that replaced ones, changed settings, frozen and hand-tied parameters
stay what they are. What a copy would lose or run beside the weights that are trained (hooks, a forward that was put on
an instance) is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from transformers import PretrainedConfig, PreTrainedModel

from harness.errors import UserError
from harness.hf.attention import attention_of

HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
# hooks of these packages serve their own recording and checkpointing and change no number
HARMLESS = ("transformers", "peft")


def require_plain(model: PreTrainedModel) -> None:
    """UserError for what a model in memory has and its trained copy would not have or do."""
    for name, module in model.named_modules():
        where = name or type(model).__name__
        for place, kind in HOOKS.items():
            if any(not _is_harmless(hook) for hook in getattr(module, place).values()):
                raise UserError(f"{where} has a {kind}, which would not run in training: remove it")
        if "forward" in vars(module):
            raise UserError(
                f"{where} has a forward set on the instance: define a module class with that forward and use it there"
            )
        if is_parametrized(module):
            raise UserError(
                f"{where} is parametrized: call torch.nn.utils.parametrize.remove_parametrizations on it first"
            )
    for name, parameter in model.named_parameters():
        if any(getattr(parameter, kind, None) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")):
            raise UserError(f"{name} has a hook on its gradient, which would not run in training: remove it")
        if isinstance(parameter, DTensor):
            raise UserError(f"{name} is already distributed over ranks: give a model that is complete on every rank")
        if parameter.is_meta:
            raise UserError(f"{name} has no values (it is on the meta device): load the model without device_map")
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"the weights of this {type(model).__name__} are quantized: dequantize them first")


def skeleton_of(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """Return a copy of `model` on the meta device, in training mode and with fp32 for every precision.

    `config` says which attention it runs with. UserError for modules that cannot be copied.
    """
    memo: dict[int, Tensor] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_on_meta(parameter), requires_grad=parameter.requires_grad)
    memo |= {id(buffer): _on_meta(buffer) for buffer in model.buffers()}
    try:
        skeleton = copy.deepcopy(model, memo)
    except Exception as error:  # a module of the user's may hold anything
        raise UserError(f"this {type(model).__name__} cannot be copied: {error}") from error
    skeleton.config.use_cache = False
    if getattr(skeleton.config, "output_router_logits", False):
        skeleton.config.output_router_logits = False
    wanted = attention_of(config)
    if wanted is not None and wanted != attention_of(model.config):
        try:
            skeleton.set_attn_implementation(wanted)
        except ValueError as error:
            raise UserError(f"--attn_implementation {wanted}: {error}") from error
    _forget_broken_ties(skeleton)
    skeleton.train()
    return skeleton


def foreign_modules(model: nn.Module, built: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of what `model` has and `built`, made from its config, has not: other classes, sizes, names."""
    expected = dict(built.named_modules())
    for name, module in model.named_modules():
        other = expected.get(name)
        if other is None or type(other) is not type(module) or _shapes(other) != _shapes(module):
            yield name, module


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}


def _forget_broken_ties(model: PreTrainedModel) -> None:
    """Take out of the model's list of ties what was untied by hand."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, other in list(model.all_tied_weights_keys.items()):
        if name in parameters and other in parameters and parameters[name] is not parameters[other]:
            model.all_tied_weights_keys.pop(name)


def _on_meta(tensor: Tensor) -> Tensor:
    kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, device="meta")


def _is_harmless(hook: object) -> bool:
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__module__", "")).partition(".")[0] in HARMLESS
