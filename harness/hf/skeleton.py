"""A HuggingFace causal language model without weights, and the source of its weights.

A skeleton is the model on the meta device: it has every module and shape, but takes no memory. Each rank later
allocates only its own layers (`weights/layer_weights.py`), so no rank ever holds the whole model.

The skeleton is built from the config, or copied from a model in memory. A copy keeps the user's changes: replaced
modules, settings, frozen and hand-tied parameters. Changes that a copy would lose (hooks, a forward set on an instance)
are refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from harness.config.model.files import has_weights
from harness.console import warn
from harness.errors import UserError
from harness.hf.layers.attention import attention_of
from harness.hf.locate import model_directory
from harness.hf.text_part import decoder_of_part

HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
LISTED: tuple[Mapping[str, str], ...] = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
# The hooks of these packages record outputs and checkpoint activations: losing them changes no number.
HARMLESS = ("transformers", "peft")


def require_plain(model: PreTrainedModel) -> None:
    """Raise UserError if a model in memory has something that its trained copy would lose: hooks, forwards, a loss."""
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
    # Where transformers keeps one that was set.
    if "_loss_function" in vars(model):
        raise UserError(
            f"this {type(model).__name__} has a loss_function of its own, which training would not call: give the "
            "Trainer a loss_fn or compute_loss_func"
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"the weights of this {type(model).__name__} are quantized: dequantize them first")


def skeleton_of(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """Return a copy of `model` on the meta device, in training mode, with all floating tensors in fp32.

    The attention implementation comes from `config`. Raises UserError for modules that cannot be copied.
    """
    # deepcopy takes what is in its memo as copied already, so it puts these into the copy and copies no weights.
    memo: dict[int, Tensor] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_on_meta(parameter), requires_grad=parameter.requires_grad)
    memo |= {id(buffer): _on_meta(buffer) for buffer in model.buffers()}
    try:
        skeleton = copy.deepcopy(model, memo)
    except Exception as error:  # a user's module may hold anything
        raise UserError(f"this {type(model).__name__} cannot be copied: {error}") from error
    # Keys and values of earlier calls are for generation alone.
    skeleton.config.use_cache = False
    if getattr(skeleton.config, "output_router_logits", False):
        skeleton.config.output_router_logits = False
    wanted = attention_of(config)
    if wanted is not None and wanted != attention_of(model.config):
        try:
            skeleton.set_attn_implementation(wanted)
        except ValueError as error:
            raise UserError(f"--attn_implementation {wanted}: {error}") from error
    forget_broken_ties(skeleton)
    skeleton.train()
    return skeleton


def foreign_modules(model: nn.Module, built: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of `model` that differ in class, size or name from `built`, made from its config."""
    expected = dict(built.named_modules())
    for name, module in model.named_modules():
        other = expected.get(name)
        if other is None or type(other) is not type(module) or _shapes(other) != _shapes(module):
            yield name, module


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}


def forget_broken_ties(model: PreTrainedModel) -> None:
    """Remove ties that the user has broken by hand from the model's list."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, other in list(model.all_tied_weights_keys.items()):
        if name in parameters and other in parameters and parameters[name] is not parameters[other]:
            model.all_tied_weights_keys.pop(name)


def _on_meta(tensor: Tensor) -> Tensor:
    # The run's dtype is given when a layer is materialised.
    kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, device="meta")


def _is_harmless(hook: object) -> bool:
    # The function of a functools.partial.
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).partition(".")[0] in HARMLESS


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model to train: its config, its weights, and perhaps the model in memory.

    Attributes:
        name: the model's name in messages, as the user wrote it.
        config: the HuggingFace config.
        weights: directory with weight files, or name -> tensor; None to initialise.
        generation: the generation config, saved with the model.
        model: the model in memory whose modules are trained; None to build them from the config.
        has_values: whether tensors get values; False in a dry run.
        prepare: called with the model on the meta device, with its adapters, before it is cut.
    """

    name: str
    config: PretrainedConfig
    weights: Path | Mapping[str, Tensor] | None
    generation: GenerationConfig | None = None
    model: PreTrainedModel | None = None
    has_values: bool = True
    prepare: Callable[[nn.Module], None] | None = None

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> ModelSource:
        """Return the source for a model in memory, with its weights and buffers.

        Raises UserError if the model has several parts, another class than its config implies (so it may not be a
        causal decoder), or something that training would lose (`require_plain`).
        """
        if is_composite(model.config):
            raise UserError(
                f"a {type(model).__name__} in memory has several parts: save it and give its directory, "
                "then its text decoder is trained"
            )
        kind = type(model).__name__
        of_config = type(model.config).__name__
        if causal_class(model.config) is not type(model):
            raise UserError(
                f"a {kind} in memory is not the causal decoder that transformers makes from its {of_config}: "
                f"if it is one, call AutoModelForCausalLM.register({of_config}, {kind}, exist_ok=True) first"
            )
        require_plain(model)
        try:
            if model.generation_config is not None:
                model.generation_config.validate()
        except ValueError as error:
            raise UserError(f"generation_config of the {kind} in memory could not be read back: {error}") from error
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        return cls(name=kind, config=model.config, weights=tensors, generation=model.generation_config, model=model)

    def skeleton(self) -> PreTrainedModel:
        """Return the model on the meta device, copied from memory or built from the config."""
        return build_skeleton(self.config) if self.model is None else skeleton_of(self.model, self.config)


def read_source(name: str) -> ModelSource:
    """Read the config of the preset or directory `name`. Raises UserError if it does not describe a model."""
    directory = model_directory(name)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a family's config class may check its fields as it likes
        reason = _reason(error)
        if "custom code" in reason:
            raise UserError(
                f"{directory / 'config.json'}: needs custom code (auto_map), which the harness does not run: load the "
                "model yourself, register its class with AutoModelForCausalLM.register, and pass it to the Trainer"
            ) from error
        raise UserError(f"{directory / 'config.json'}: not a model that transformers supports: {reason}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{directory / 'config.json'}: the weights are quantized: dequantize them and save the model again"
        )
    config = text_decoder(config)
    # Registers the class of a text decoder that was trained from its whole model, and is now read again.
    causal_class(config)
    # Absolute, as the run may change its working directory before it reads them.
    weights = directory.absolute() if has_weights(directory) else None
    return ModelSource(name=name, config=config, weights=weights, generation=_read_generation(directory))


def _read_generation(directory: Path) -> GenerationConfig | None:
    file = directory / "generation_config.json"
    if not file.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise UserError(f"{file}: cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the first line of transformers' message about a config, plus the second if the first ends in ":"."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # Its text is only the key.
    if isinstance(error, KeyError):
        return f"KeyError: {lines[0]}"
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def is_composite(config: PretrainedConfig) -> bool:
    """Return whether a config describes a vision-language model: a text decoder with image encoders."""
    with_images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return with_images and isinstance(getattr(config, "text_config", None), PretrainedConfig)


def text_decoder(config: PretrainedConfig) -> PretrainedConfig:
    """Return a vision-language model's text decoder config, with a warning, or any other config unchanged.

    Raises UserError if transformers has no causal class for the text decoder alone.
    """
    if not is_composite(config):
        return config
    text: PretrainedConfig = config.text_config
    if text.is_encoder_decoder or causal_class(text) is None:
        raise UserError(
            f"model type {config.model_type!r} has several parts, but transformers has no causal decoder for its text "
            f"part ({text.model_type}) alone, so it cannot be trained here"
        )
    warn(
        f"only the text decoder ({text.model_type}) of this {config.model_type} model is trained; its other parts stay "
        "unchanged"
    )
    text = copy.deepcopy(text)
    # Some configs leave it to their parts.
    if (tied := getattr(config, "tie_word_embeddings", None)) is not None:
        text.tie_word_embeddings = tied
    return text


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return transformers' causal class for a config, or the one registered for it, or None."""
    kind = type(config)
    known: object = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    # transformers lists some text decoders only under the model type of the whole model, and has only the parts of
    # others (`text_part.py`).
    if known is None:
        package = kind.__module__.split(".")[-2:-1]
        # Of both tables, model type -> class name, the classes in the config's own package.
        listed, wholes = (
            [name for key, name in names.items() if [model_type_to_module_name(key)] == package] for names in LISTED
        )
        known = next((found for name in listed if (found := getattr(transformers, name)).config_class is kind), None)
        if known is None and wholes:
            known = decoder_of_part(kind, wholes)
        # So that AutoModelForCausalLM builds and loads it.
        if known is not None:
            AutoModelForCausalLM.register(kind, known, exist_ok=True)
    return known if isinstance(known, type) and issubclass(known, PreTrainedModel) else None


def position_limit(config: PretrainedConfig) -> int | None:
    """Return a model's longest sequence; None if its config sets no limit (some write -1)."""
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build the causal language model of `config` on the meta device, in training mode.

    Raises UserError if transformers has none, or not with the attention implementation that the config names.
    """
    config = copy.deepcopy(config)
    config.use_cache = False
    if getattr(config, "output_router_logits", False):
        # Only the end of the forward can return them, and asks for them (`harness/extras/router_loss.py`).
        config.output_router_logits = False
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # a family's constructor may raise anything
        reason = _reason(error)
        if (wanted := attention_of(config)) and "attention implementation" in reason:
            raise UserError(
                f"{reason.partition(' yet.')[0]}: use another --attn_implementation than {wanted}"
            ) from error
        raise UserError(f"model type {config.model_type!r} cannot be trained as a causal decoder: {reason}") from error
    model: PreTrainedModel = built.train()
    return model


def with_key_per_head(config: PretrainedConfig) -> PretrainedConfig | None:
    """Return `config` with as many key heads as heads, if its weights have a key for each head anyway; else None.

    Attention that makes keys from a compressed form does not read `num_key_value_heads` for their number, but
    transformers still repeats each key by the ratio of the two, and then fails on the shapes.
    """
    text = config.get_text_config(decoder=True)
    # Not getattr: transformers raises if each layer has its own number.
    heads = vars(text).get("num_attention_heads")
    keys = vars(text).get("num_key_value_heads")
    if not isinstance(heads, int) or not isinstance(keys, int) or heads <= keys:
        return None
    changed = copy.deepcopy(config)
    changed.get_text_config(decoder=True).num_key_value_heads = heads
    before = {name: parameter.shape for name, parameter in build_skeleton(config).named_parameters()}
    after = {name: parameter.shape for name, parameter in build_skeleton(changed).named_parameters()}
    return changed if before == after else None


def too_few_key_heads(config: PretrainedConfig, changed: PretrainedConfig) -> UserError:
    """Return the error for a config that `with_key_per_head` has changed."""
    keys = config.get_text_config(decoder=True).num_key_value_heads
    heads = changed.get_text_config(decoder=True).num_key_value_heads
    return UserError(
        f"model type {config.model_type!r}: num_key_value_heads is {keys}, but its weights have a key for each of the "
        f"{heads} heads, so transformers' attention fails: set num_key_value_heads to {heads}, which changes no weight"
    )
