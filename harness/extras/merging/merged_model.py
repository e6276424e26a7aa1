"""A base model with adapters merged into it, whose tensors are computed when they are read.

peft's own layers do the arithmetic. The model is a skeleton on the meta device, and one layer at a time gets its
values. So they are those of `merge_and_unload` on the whole model, loaded in the dtype of its files.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.errors import UserError, headline
from harness.hf.adapters import PREFIX
from harness.hf.layers.wrappers import Wrapper
from harness.hf.weights.lazy_tensor import Box, LazyTensor

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, eq=False)
class MergedParameter:
    """A parameter of the merged model: the source of the values that are written."""

    model: MergedModel
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, into: Tensor, box: Box) -> None:
        """Copy the values in `box` to `into`, which has the sizes of `box`."""
        into.copy_(self.model.value(self.name)[tuple(slice(*span) for span in box)])


class MergedModel:
    """The parameters of a model with its adapters merged.

    Attributes:
        changed: names of the parameters that adapters change or replace, as in the model without adapters.
        untied: names of the parameters that share their values with another one in the base model, but no longer do.
    """

    def __init__(self, skeleton: PreTrainedModel, adapters: Sequence[Path], base: Mapping[str, LazyTensor]) -> None:
        """Load `adapters` (directories) onto a skeleton, whose weights are `base`. UserError if they do not fit it."""
        ties = dict(skeleton.all_tied_weights_keys)
        self._base = base
        self._adapters = [f"adapter_{number}" for number in range(len(adapters))]
        self._model = _with_adapters(skeleton, adapters, self._adapters)
        self._layers = dict(_adapted_layers(self._model))
        self._replaced = {
            name: parameter.detach()
            for name, parameter in _inner(self._model).named_parameters()
            if not parameter.is_meta and not any(name.startswith(f"{path}.") for path in self._layers)
        }
        self._layer_of = {
            f"{path}.{name}": path
            for path, layer in self._layers.items()
            for name, _ in _base_layer_of(layer).named_parameters()
        }
        self.changed = frozenset(self._layer_of.keys() | self._replaced.keys())
        self._merged: tuple[str, dict[str, Tensor]] = ("", {})  # the layer merged last, whose tensors follow each other
        self.untied = frozenset(self._find_untied(ties))

    def parameter(self, name: str) -> MergedParameter:
        """Return a parameter as a source of values, in the dtype of the base model's files."""
        shape = self._replaced[name].shape if name in self._replaced else self._shape_of(name)
        return MergedParameter(self, name, tuple(shape), stored_dtype(self._base[name]))

    def value(self, name: str) -> Tensor:
        """Return the values of a parameter of the merged model, or of an unchanged one."""
        if name in self._replaced:
            return self._replaced[name].to(stored_dtype(self._base[name]))
        path = self._layer_of.get(name)
        if path is None:
            return _realised(self._base[name])
        if self._merged[0] != path:
            self._merged = "", {}  # free the last layer before the next is read
            self._merged = path, self._merge(path)
        return self._merged[1][name]

    @torch.no_grad()
    def _merge(self, path: str) -> dict[str, Tensor]:
        """Return the merged parameters of one layer by name, as peft's `merge_and_unload` computes them."""
        layer = copy.deepcopy(self._layers[path])
        own = _base_layer_of(layer)
        dtypes = {}
        for name, parameter in list(own.named_parameters()):
            lazy = self._base[f"{path}.{name}"]
            dtypes[name] = stored_dtype(lazy)
            if parameter.is_meta:  # a bias that was trained is not
                module, _, leaf = name.rpartition(".")
                own.get_submodule(module).register_parameter(leaf, nn.Parameter(_realised(lazy), requires_grad=False))
        merged = _unloaded(layer, self._adapters)
        return {f"{path}.{name}": parameter.detach().to(dtypes[name]) for name, parameter in merged.named_parameters()}

    def _shape_of(self, name: str) -> tuple[int, ...]:
        path = self._layer_of.get(name)
        if path is None:
            return tuple(self._base[name].shape)
        layer = self._layers[path]
        saved = getattr(layer, "modules_to_save", None)
        whole = _base_layer_of(layer) if saved is None else next(iter(saved.values()))
        return tuple(whole.get_parameter(name.removeprefix(f"{path}.")).shape)

    def _find_untied(self, ties: Mapping[str, str]) -> Iterator[str]:
        """Yield the names of ties that adapters have broken. UserError if merging would change both tied weights."""
        for pair in ties.items():
            concerned = [name for name in pair if name in self.changed]
            if adapted := [
                name for name in concerned if hasattr(self._layers.get(self._layer_of.get(name, "")), "merge")
            ]:
                raise UserError(
                    f"{' and '.join(pair)} are one weight, and merging the adapters of {adapted[0]} would change both: "
                    "untie the base model's weights first (tie_word_embeddings)"
                )
            if concerned and not torch.equal(*map(self.value, pair)):
                yield pair[0]


def stored_dtype(lazy: LazyTensor) -> torch.dtype:
    """Return the dtype of a tensor in its files."""
    return reduce(torch.promote_types, {leaf.dtype for leaf in lazy.leaves()})


def _realised(lazy: LazyTensor) -> Tensor:
    values = torch.empty(lazy.shape, dtype=stored_dtype(lazy))
    lazy.read_into(values)
    return values


# -- peft ----------------------------------------------------------------------------------------------------


class _LoadReport(Protocol):
    missing_keys: list[str]
    unexpected_keys: list[str]


def _with_adapters(skeleton: PreTrainedModel, adapters: Sequence[Path], names: Sequence[str]) -> PeftModel:
    """Return peft's model with adapters loaded onto a skeleton, which stays on meta. UserError if they do not fit."""
    model: PreTrainedModel | PeftModel = skeleton
    for name, directory in zip(names, adapters, strict=True):
        try:
            with warnings.catch_warnings():  # of what peft uses in transformers, and of unknown settings
                warnings.simplefilter("ignore")
                model, report = _load(model, directory, name)
        except (ValueError, TypeError, KeyError, RuntimeError, OSError, SafetensorError) as error:
            raise UserError(f"{directory}: these adapters do not fit the base model: {_reason(error)}") from error
        if missing := [key for key in report.missing_keys if "lora_" in key]:
            raise UserError(
                f"{directory / WEIGHTS} lacks {_plain(missing[0], name)}: are these adapters of another model?"
            )
        if unknown := [key for key in report.unexpected_keys if not _is_copy(key)]:
            raise UserError(
                f"{directory / WEIGHTS} has {_plain(unknown[0], name)}, which the base model lacks: are these adapters "
                "of another model?"
            )
    loaded = cast("PeftModel", model)
    _activate_saved_modules(loaded, adapters, names)
    return loaded


def _load(model: PreTrainedModel | PeftModel, directory: Path, name: str) -> tuple[PeftModel, _LoadReport]:
    """Return peft's model with the adapter of a directory, and what it says of missing and of unknown tensors.

    Args:
        model: a skeleton, or peft's model with other adapters.
        name: the adapter's name in peft's model.
    """
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(str(directory))
    if config.is_prompt_learning:
        raise UserError(f"{directory}: {config.peft_type.value} changes no weights, so it cannot be merged")
    config.inference_mode = True
    if isinstance(model, PeftModel):
        model.add_adapter(name, config, low_cpu_mem_usage=True)
    else:
        model = PeftModel(model, config, adapter_name=name, low_cpu_mem_usage=True)
    for module in model.modules():
        if hasattr(module, "_move_adapter_to_device_of_base_layer"):  # which is meta: values would be lost
            vars(module)["_move_adapter_to_device_of_base_layer"] = _stay
    report: _LoadReport = model.load_adapter(str(directory), name, low_cpu_mem_usage=True, torch_device="cpu")
    cast("BaseTuner", model.base_model)._check_merge_allowed()  # noqa: SLF001  # `merge_and_unload` asks this first
    return model, report


def _stay(*_: object, **__: object) -> None:
    """Move nothing."""


def _is_copy(key: str) -> bool:
    """Return whether peft has saved a module once more: it saves all tensors of a resized embedding and its wrapper."""
    return ".modules_to_save." in key or ".original_module." in key


def _plain(key: str, adapter: str) -> str:
    return key.removeprefix(PREFIX).replace(f".{adapter}", "")


def _reason(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if "size mismatch" in line), headline(error))


def _activate_saved_modules(model: PeftModel, adapters: Sequence[Path], names: Sequence[str]) -> None:
    """Let each module that adapters replace as a whole be that of its adapter. UserError if several replace it."""
    from peft.utils import ModulesToSaveWrapper

    for path, module in _inner(model).named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            first, *more = [adapters[number] for number, name in enumerate(names) if name in module.modules_to_save]
            if more:
                raise UserError(f"{first} and {more[0]} both replace {path} (modules_to_save): merge only one of them")
            module.set_adapter(names[adapters.index(first)])


def _inner(model: PeftModel) -> nn.Module:
    inner: nn.Module = model.get_base_model()
    return inner


def _adapted_layers(model: PeftModel) -> Iterator[tuple[str, Wrapper]]:
    """Yield path and module of peft's outermost layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    inside: tuple[str, ...] = ()
    for path, module in _inner(model).named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not path.startswith(inside):
            inside = (*inside, f"{path}.")
            yield path, module


def _base_layer_of(layer: Wrapper) -> nn.Module:
    """Return the base model's own module inside a layer of peft."""
    own: nn.Module = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module
    return own


def _unloaded(layer: Wrapper, names: Sequence[str]) -> nn.Module:
    """Return the module that `merge_and_unload` leaves in the place of a layer, whose base layer has its values."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        module: nn.Module = layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=list(names)
        )
        return module
    layer.merge(safe_merge=False, adapter_names=list(names))
    return _base_layer_of(layer)
