"""Fill a pipeline layer's local parameters: initialised from a seed, or read from a checkpoint.

The layers are already sharded, and on the meta device. `param.shard` describes the rank's shard of each tensor. So the
functions here know neither the layout nor how a checkpoint's tensors are converted to the model's (`conversion.py`).
They need only a few MB besides the layer itself: no tensor is read or drawn whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.console import warn
from harness.errors import UserError
from harness.hf.weights.initialization import (
    PIECE_BYTES,
    Drawn,
    Scratch,
    changes_of,
    constructed,
    is_unfilled,
    mark_unfilled,
    standing_for,
)
from harness.hf.weights.lazy_tensor import LazyTensor
from harness.hf.weights.tensor_files import Stored
from harness.parallel.zero import Zero3Partition


class WeightSource(Protocol):
    """A source of weights."""

    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Fill the materialised `layer`; `whole` is the same layer, unsharded, on the meta device."""


class ModelWeights(Protocol):
    """The weights of a model without adapters."""

    @property
    def part(self) -> Zero3Partition | None:
        """This rank's part of every parameter under ZeRO-3; the rest is not filled."""

    def values(self, whole: nn.Module, names: Set[str], device: torch.device) -> Mapping[str, Tensor]:
        """Return the uncut values, which may be lazy, of the tensors `names` of the uncut layer `whole`."""

    @torch.no_grad()
    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Fill what the materialised `layer` holds."""
        local = dict([*layer.named_parameters(remove_duplicate=False), *layer.named_buffers()])
        values = self.values(whole, local.keys(), next(iter(local.values())).device)
        # In the order of the files, so that the disk is read sequentially.
        for name in sorted(local, key=lambda name: _position(values[name])):
            fill(local[name], values[name], self.part)


def materialise(
    layer: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    kept: Set[str] = frozenset(),
    buffers: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Allocate every meta parameter and buffer of `layer` on `device`; floating-point parameters get `dtype`.

    Keeps parameter attributes such as `shard`, and ties inside the layer.

    Args:
        kept: names of parameters that become float32, with an attribute `kept_in_fp32`.
        buffers: name -> dtype of buffers to cast.
    """
    real: dict[int, nn.Parameter] = {}
    for path, module in layer.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in real:
                keep = parameter.is_floating_point() and f"{path}.{name}" in kept
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                data = torch.empty(parameter.shape, dtype=torch.float32 if keep else kind, device=device)
                real[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                # A fake tensor keeps its device and more here, which must not be replaced.
                own = real[id(parameter)].__dict__
                own.update({key: value for key, value in parameter.__dict__.items() if key not in own})
                if keep:
                    real[id(parameter)].kept_in_fp32 = True  # type: ignore[attr-defined]
            module.register_parameter(name, real[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            kind = buffers.get(f"{path}.{name}" if path else name, buffer.dtype)
            setattr(module, name, torch.empty_like(buffer, dtype=kind, device=device))


@dataclass(frozen=True)
class NoValues(ModelWeights):
    """Fills nothing: the tensors of a dry run have no values."""

    part: None = None

    def values(self, _whole: nn.Module, _names: Set[str], _device: torch.device) -> Mapping[str, Tensor]:
        return {}

    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Leave the layer as it is."""


@dataclass(frozen=True, kw_only=True)
class Initialiser(ModelWeights):
    """Initial weights as the model's own `_init_weights` draws them, the same in every layout (`initialization.py`)."""

    model: PreTrainedModel
    seed: int
    part: Zero3Partition | None = None

    def values(self, whole: nn.Module, names: Set[str], device: torch.device) -> dict[str, Tensor]:
        """Return the initial values of `names` in `whole`; those of parameters are lazy tensors, drawn when read."""
        values = self._buffers(whole, {name for name, _ in whole.named_buffers() if name in names}, device)
        places: dict[int, list[str]] = {}
        for name, parameter in whole.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append(name)
        scratch = Scratch()
        for own_names in places.values():
            if not names.isdisjoint(own_names):
                lazy = LazyTensor.of(self._drawn(whole, own_names, device, scratch))
                values |= dict.fromkeys(own_names, lazy)
        return values

    def _drawn(self, whole: nn.Module, names: list[str], device: torch.device, scratch: Scratch) -> Drawn:
        # The first of tied names: transformers initialises a parameter before it ties others to it.
        name = names[0]
        parameter = whole.get_parameter(name)

        def initialise(values: Tensor) -> None:
            with standing_for(names, whole, values):
                self._initialise(whole, "", self.model, [name])

        def draw(values: Tensor) -> None:
            mark_unfilled([values])
            initialise(values)
            # `_init_weights` has not touched it, so its values are the constructor's.
            if is_unfilled(values):
                # A parameter too large for `_constructed` comes from another model, built with its shape alone.
                made = self._constructed
                made = made if name in made else constructed(self.model, self.seed, values.shape)
                values.copy_(made[name])

        return Drawn(
            name=name,
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            seed=self.seed,
            device=device,
            draw=draw,
            # A small tensor is a single piece anyway.
            changes=changes_of(parameter, initialise) if parameter.nbytes > PIECE_BYTES else None,
            scratch=scratch,
        )

    def _buffers(self, whole: nn.Module, names: Set[str], device: torch.device) -> dict[str, Tensor]:
        """Return the buffers `names` of `whole` from `_init_weights` or the model's constructor."""
        if not names:
            return {}
        scratch = _with_real_buffers(whole, names, device)
        found = {name: buffer for name, buffer in scratch.named_buffers() if name in names}
        mark_unfilled(found.values())
        self._initialise(scratch, "", self.model, names)
        for name, buffer in found.items():
            if is_unfilled(buffer):
                buffer.copy_(self._constructed[name])
        return found

    def _initialise(self, module: nn.Module, name: str, owner: PreTrainedModel, names: Iterable[str]) -> None:
        """Initialise children first, then `module`, each by the `_init_weights` of the innermost model around it.

        Modules without any of the tensors `names`, at any depth, are skipped.
        """
        inner = self._models.get(name, owner)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}".lstrip(".")
            inside = [tensor for tensor in names if tensor.startswith(path + ".")]
            if inside:
                self._initialise(child, path, inner, inside)
        # The method in which a family draws its weights, and fills buffers.
        inner._init_weights(module)  # noqa: SLF001

    @cached_property
    def _constructed(self) -> dict[str, Tensor]:
        return constructed(self.model, self.seed)

    @cached_property
    def _models(self) -> dict[str, PreTrainedModel]:
        return {name: module for name, module in self.model.named_modules() if isinstance(module, PreTrainedModel)}


@dataclass(frozen=True, kw_only=True)
class MemoryReader(ModelWeights):
    """The weights of a model that is already in memory, as in `Trainer(model=<a PreTrainedModel>)`."""

    tensors: Mapping[str, Tensor]
    part: None = None

    def values(self, _whole: nn.Module, _names: Set[str], _device: torch.device) -> Mapping[str, Tensor]:
        return self.tensors


@dataclass(frozen=True, kw_only=True)
class CheckpointReader(ModelWeights):
    """The weights of a checkpoint; each rank reads only its slices. Tensors in no file are initialised."""

    tensors: Mapping[str, LazyTensor]
    initialiser: Initialiser
    part: Zero3Partition | None = None

    def values(self, whole: nn.Module, names: Set[str], device: torch.device) -> Mapping[str, Tensor]:
        """Return lazy tensors, read when they are copied."""
        return {**self.initialiser.values(whole, names - self.tensors.keys(), device), **self.tensors}


def read_by_transformers(directory: Path, refusal: UserError) -> MemoryReader:
    """Let transformers read a checkpoint that cannot be read in slices; every rank then holds all of it.

    Raises `refusal` if tensors are still missing.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    if set(info["missing_keys"]) - set(model.all_tied_weights_keys) or info["mismatched_keys"]:
        raise refusal
    warn(f"{directory}: cannot be read in slices, so each rank reads all of it")
    return MemoryReader(tensors={**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())})


def fill(tensor: Tensor, full: Tensor, part: Zero3Partition | None) -> None:
    """Copy the full tensor into a buffer, or the rank's shard of it into a parameter.

    `tensor` has the shape of the buffer or the shard. Under ZeRO-3 only `part` of a parameter is read and copied.
    """
    if part is None or not isinstance(tensor, nn.Parameter):
        fill_local(tensor, full)
        return
    shard = getattr(tensor, "shard", None)
    local = full if shard is None else shard.take(full)
    for index in part.boxes(tensor.shape):
        tensor[index].copy_(local[index])


def fill_local(tensor: Tensor, full: Tensor) -> None:
    """Copy the rank's shard of the full, perhaps lazy, tensor into `tensor`, of the shard's shape."""
    shard = getattr(tensor, "shard", None)
    if shard is not None:
        shard.read_into(tensor, full)
    else:
        tensor.copy_(full)


def _position(values: Tensor) -> tuple[str, int]:
    """Return file and offset of values in a file; the same for all others."""
    leaves = values.leaves() if isinstance(values, LazyTensor) else ()
    return next((leaf.position for leaf in leaves if isinstance(leaf, Stored)), ("", 0))


def _with_real_buffers(whole: nn.Module, names: Set[str], device: torch.device) -> nn.Module:
    """Return a copy of a meta module with memory for the buffers `names`."""
    scratch = copy.deepcopy(whole)
    for prefix, module in scratch.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if f"{prefix}.{name}".lstrip(".") in names:
                setattr(module, name, torch.empty_like(buffer, device=device))
    return scratch
