"""Fill a pipeline layer's local parameters: initialised from a seed, or read from a checkpoint.

A layer comes here cut and on the meta device. What it keeps of each tensor stands on the parameter
(`param.shard`), so nothing here knows how the model is laid out, nor how a checkpoint's tensors come to be the
model's (`conversion.py`). Memory beyond the layer itself: one uncut layer while it is initialised, a few MB while
it is read.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.config.errors import UserError
from harness.models.buffers import built_buffers, mark_unfilled, unfilled
from harness.models.lazy import Lazy
from harness.models.tensorfiles import Stored
from harness.parallel.flatpart import FlatPart


class WeightSource(Protocol):
    """Where weights come from."""

    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Fill the materialised `layer`; `whole` is the same layer uncut, on the meta device."""


def materialise(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give every meta parameter and buffer of `layer` memory on `device`; floating parameters get `dtype`.

    A parameter's attributes (`shard` among them) are kept, and so are ties inside the layer.
    """
    real: dict[int, nn.Parameter] = {}
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in real:
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                data = torch.empty(parameter.shape, dtype=kind, device=device)
                real[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                real[id(parameter)].__dict__.update(parameter.__dict__)
            module.register_parameter(name, real[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)


@dataclass(frozen=True, kw_only=True)
class Initialiser:
    """Initial weights as the model's own `_init_weights` draws them, the same in every layout.

    The random numbers of a layer depend on the seed and on the names of its tensors alone.
    """

    model: PreTrainedModel
    seed: int

    @torch.no_grad()
    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Initialise the uncut layer, and keep of it what `layer` holds."""
        names = {name for name, _ in _named_tensors(layer)}
        tensors = self.drawn(whole, names, next(layer.parameters()).device)
        for name, tensor in _named_tensors(layer):
            fill_local(tensor, tensors[name])

    def drawn(self, whole: nn.Module, names: Set[str], device: torch.device) -> dict[str, Tensor]:
        """The initial values of `names` in the uncut layer `whole`; memory is taken for these alone."""
        digest = hashlib.sha256(f"{self.seed}:{','.join(name for name, _ in whole.named_parameters())}".encode())
        scratch = _partly_real(whole, names, device)
        mark_unfilled(scratch)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest.digest()[:8], "little", signed=True))
            self._initialise(scratch, "", self.model)
        drawn = {name: tensor for name, tensor in _named_tensors(scratch) if name in names}
        for name in unfilled((name, buffer) for name, buffer in scratch.named_buffers() if name in names):
            drawn[name].copy_(self._built_buffers[name])
        return drawn

    def _initialise(self, module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        """Initialise what is inside, then `module` itself, each by the innermost model of transformers around it."""
        inner = self._models.get(name, owner)
        for child_name, child in module.named_children():
            self._initialise(child, f"{name}.{child_name}".lstrip("."), inner)
        inner._init_weights(module)

    @cached_property
    def _built_buffers(self) -> dict[str, Tensor]:
        return built_buffers(self.model)

    @cached_property
    def _models(self) -> dict[str, PreTrainedModel]:
        return {name: module for name, module in self.model.named_modules() if isinstance(module, PreTrainedModel)}


@dataclass(frozen=True, kw_only=True)
class MemoryReader:
    """The weights of a model that is already in memory, as `Trainer(model=<a PreTrainedModel>)` gives it."""

    tensors: Mapping[str, Tensor]

    @torch.no_grad()
    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Copy what `layer` holds."""
        for name, tensor in _named_tensors(layer):
            fill_local(tensor, self.tensors[name])


@dataclass(frozen=True, kw_only=True)
class CheckpointReader:
    """The weights of a checkpoint, of which each rank reads its slices alone.

    `part`: of every parameter the part that this rank will keep of it (ZeRO-3); the rest of it is left as it is.
    """

    tensors: Mapping[str, Lazy]
    initialiser: Initialiser
    part: FlatPart | None = None

    @torch.no_grad()
    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Read what `layer` holds, in the order of the files; what is in none is made as in a new model."""
        local = dict(_named_tensors(layer))
        unread = {name for name in local if name not in self.tensors}
        if unread:
            drawn = self.initialiser.drawn(whole, unread, next(iter(local.values())).device)
            for name in unread:
                fill_local(local[name], drawn[name])
        for name in sorted(local.keys() - unread, key=lambda name: _position(self.tensors[name])):
            if self.part is not None and isinstance(local[name], nn.Parameter):
                fill_part(local[name], self.tensors[name], self.part)
            else:
                fill_local(local[name], self.tensors[name])


def read_by_transformers(directory: Path, told: UserError) -> MemoryReader:
    """Let transformers read a checkpoint that cannot be read slice by slice; every rank then holds all of it.

    Raises `told` if tensors are missing all the same.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    if set(info["missing_keys"]) - set(model.all_tied_weights_keys) or info["mismatched_keys"]:
        raise told
    warnings.warn(f"{directory}: cannot be read slice by slice, so each rank reads all of it", stacklevel=2)
    return MemoryReader(tensors={**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())})


def fill_local(tensor: Tensor, full: Tensor) -> None:
    """Copy into `tensor` what its rank keeps of the full tensor, which may be lazy."""
    shard = getattr(tensor, "shard", None)
    if shard is not None:
        shard.read_into(tensor, full)
    else:
        tensor.copy_(full)


def fill_part(tensor: Tensor, full: Lazy, part: FlatPart) -> None:
    """Copy into a part of `tensor`, flattened, what belongs there of what its rank keeps of the full tensor."""
    shard = getattr(tensor, "shard", None)
    local = full if shard is None else shard.take(full)
    for index in part.boxes(tensor.shape):
        tensor[index].copy_(local[index])


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Its parameters, each under all of its names, and its buffers."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]


def _position(lazy: Lazy) -> tuple[str, int]:
    return next((leaf.position for leaf in lazy.leaves() if isinstance(leaf, Stored)), ("", 0))


def _partly_real(whole: nn.Module, names: Set[str], device: torch.device) -> nn.Module:
    """A copy of a module on meta in which `names` have memory."""
    scratch = copy.deepcopy(whole)
    real: dict[int, Tensor] = {}
    for prefix, module in scratch.named_modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and f"{prefix}.{name}".lstrip(".") in names:
                    if id(tensor) not in real:
                        fresh = torch.empty_like(tensor, device=device)
                        real[id(tensor)] = nn.Parameter(fresh) if isinstance(tensor, nn.Parameter) else fresh
                    held[name] = real[id(tensor)]
    return scratch
