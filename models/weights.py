"""Fill a pipeline layer's local parameters: initialised from a seed, or read from safetensors.

A layer comes here cut and on the meta device. What it keeps of each tensor stands on the parameter
(`param.shard`), so nothing here knows how the model is laid out. Memory beyond the layer itself: one uncut
layer while it is initialised, nothing while it is read.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.config.errors import UserError

INDEX = "model.safetensors.index.json"


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
        device = next(layer.parameters()).device
        scratch = copy.deepcopy(whole).to_empty(device=device)
        names = ",".join(name for name, _ in scratch.named_parameters())
        digest = hashlib.sha256(f"{self.seed}:{names}".encode()).digest()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            scratch.apply(self.model._init_weights)
        tensors = dict(scratch.named_parameters(remove_duplicate=False))
        for name, parameter in layer.named_parameters():
            fill_local(parameter, tensors[name])
        buffers = dict(scratch.named_buffers())
        for name, buffer in layer.named_buffers():
            buffer.copy_(buffers[name])


@dataclass(frozen=True, kw_only=True)
class MemoryReader:
    """The weights of a model that is already in memory, as `Trainer(model=<a PreTrainedModel>)` gives it."""

    tensors: Mapping[str, Tensor]

    @torch.no_grad()
    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Copy what `layer` holds."""
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            fill_local(tensor, self.tensors[name])


class OtherNames(UserError):
    """A checkpoint lacks tensors of the model, or holds them under other names or shapes."""


class SafetensorsReader:
    """The tensors of a HuggingFace directory, read slice by slice.

    Args:
        directory: holds `model.safetensors`, or shards with their index.
        model: the skeleton that the tensors belong to.

    Raises:
        OtherNames: tensors of the model are missing, at least under their names.
        UserError: an index or file cannot be read.
    """

    def __init__(self, directory: Path, model: PreTrainedModel, seed: int) -> None:
        self._files = tensor_files(directory)
        self._directory = directory
        self._prefix = model.base_model_prefix + "."
        self._initialiser = Initialiser(model=model, seed=seed)
        tied = set(model.all_tied_weights_keys)
        expected = [name for name in model.state_dict() if name not in tied]
        missing = [name for name in expected if self._stored_name(name) is None]
        if missing:
            raise OtherNames(
                f"{directory}: {_some(missing)} not in the safetensors of this {model.config.model_type} model"
            )
        known = {self._stored_name(name) for name in (*expected, *tied)}
        extra = [name for name in self._files if name not in known]
        if extra:
            warnings.warn(f"{directory}: not used, as the model has no such tensors: {_some(extra)}", stacklevel=2)

    @torch.no_grad()
    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Read what `layer` holds; buffers that are in no file are made by the model's own initialisation."""
        if any(True for _ in layer.buffers()):
            self._initialiser.fill(layer, whole)
        shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters(remove_duplicate=False)}
        stored = {name: self._stored_name(name) for name, _ in (*layer.named_parameters(), *layer.named_buffers())}
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            key = stored[name]
            if key is not None:  # a tied tensor may stand in the file under its other name: the tie fills it
                self._read(key, tensor, shapes.get(name, tuple(tensor.shape)))

    def _read(self, key: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        path = self._directory / self._files[key]
        try:
            with safe_open(path, framework="pt") as file:
                piece = file.get_slice(key)
                if tuple(piece.get_shape()) != shape:
                    found = tuple(piece.get_shape())
                    raise UserError(f"{path}: {key} has shape {found}, the config asks for {shape}")
                fill_local(tensor, piece if piece.get_shape() else file.get_tensor(key))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: {key} cannot be read: {error}") from error

    def _stored_name(self, name: str) -> str | None:
        """The file's name of a tensor: a checkpoint of the base model lacks the prefix."""
        candidates = (name, name.removeprefix(self._prefix), self._prefix + name)
        return next((candidate for candidate in candidates if candidate in self._files), None)


def read_by_transformers(directory: Path, told: OtherNames) -> MemoryReader:
    """Let transformers read a checkpoint whose tensors it renames or joins (experts stored one by one, say).

    Every rank then holds the whole model for a moment. Raises `told` if tensors are missing all the same.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    if set(info["missing_keys"]) - set(model.all_tied_weights_keys) or info["mismatched_keys"]:
        raise told
    warnings.warn(
        f"{directory}: its tensors have other names than the model's, so each rank reads all of them", stacklevel=2
    )
    return MemoryReader(tensors={**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())})


def tensor_files(directory: Path) -> dict[str, str]:
    """Tensor name -> file name for all safetensors of a directory; UserError if a file cannot be read."""
    index = directory / INDEX
    try:
        if index.is_file():
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        names: dict[str, str] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names.update(dict.fromkeys(file.keys(), path.name))
        return names
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{directory}: its safetensors cannot be read: {error}") from error


def fill_local(tensor: Tensor, full: Any) -> None:
    """Copy into `tensor` what its rank keeps of the full tensor (or safetensors slice) `full`."""
    shard = getattr(tensor, "shard", None)
    if shard is not None:
        shard.read_into(tensor, full)
    else:
        tensor.copy_(full if isinstance(full, Tensor) else full[:])


def _some(names: Iterable[str]) -> str:
    names = list(names)
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
