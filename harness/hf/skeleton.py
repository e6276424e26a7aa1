"""A HuggingFace causal language model without weights, and where its weights would come from.

A skeleton is the model built on the meta device: every module and shape is there, no memory is taken. Each
rank later materialises the parts that it keeps (see `weights.py`), so no rank ever holds the whole model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from harness.errors import UserError
from harness.hf.attention import attention_of
from harness.hf.locate import model_directory
from harness.hf.weights.in_memory import require_plain, skeleton_of
from harness.hf.weights.tensor_files import has_tensors


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What `--model_name_or_path` names.

    Attributes:
        name: as the user wrote it.
        config: the HuggingFace config.
        weights: directory that holds weight files, or tensors by name, or None if they are to be initialised.
        generation: how the model generates text, saved beside it.
        model: the model in memory whose own modules are trained; None if they are made from the config.
        has_values: whether the layers' tensors get values, which those of a dry run have not.
    """

    name: str
    config: PretrainedConfig
    weights: Path | Mapping[str, Tensor] | None
    generation: GenerationConfig | None = None
    model: PreTrainedModel | None = None
    has_values: bool = True

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> ModelSource:
        """Return a model that is already in memory, with its weights and buffers.

        UserError for one of several parts, for one of another class than its config stands for, as it may be no
        causal decoder, and for what could not be trained as it is (`memory.py`).
        """
        if is_composite(model.config):
            raise UserError(
                f"a {type(model).__name__} in memory has several parts: save it and give its directory, "
                "then its text decoder is trained"
            )
        kind, of_config = type(model).__name__, type(model.config).__name__
        if _causal_class(model.config) is not type(model):
            raise UserError(
                f"a {kind} in memory is not the causal decoder that transformers makes from its {of_config}: "
                f"if it is one, call AutoModelForCausalLM.register({of_config}, {kind}, exist_ok=True) first"
            )
        require_plain(model)
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        return cls(name=kind, config=model.config, weights=tensors, generation=model.generation_config, model=model)

    def skeleton(self) -> PreTrainedModel:
        """Return the model on the meta device: a copy of the one in memory, or built from the config."""
        return build_skeleton(self.config) if self.model is None else skeleton_of(self.model, self.config)


def read_source(name: str) -> ModelSource:
    """Read the config of the preset or directory `name`; UserError if it is none or does not describe a model."""
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
    weights = directory.absolute() if has_tensors(directory) else None
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
    """Return what transformers says of a config, in one line: its first, and the second where the first only leads to
    it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, KeyError):  # says nothing but the key
        return f"KeyError: {lines[0]}"
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def is_composite(config: PretrainedConfig) -> bool:
    """Whether a config is that of a model which puts a text decoder beside encoders of images."""
    with_images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return with_images and isinstance(getattr(config, "text_config", None), PretrainedConfig)


def text_decoder(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the text decoder inside a model of several parts, with a warning; any other config as it is.

    UserError where transformers has no causal class for the text part alone.
    """
    if not is_composite(config):
        return config
    text: PretrainedConfig = config.text_config
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or text.is_encoder_decoder:
        raise UserError(
            f"model type {config.model_type!r} has several parts, but transformers has no causal decoder for its text "
            f"part ({text.model_type}) alone, so it cannot be trained here"
        )
    warnings.warn(
        f"only the text decoder ({text.model_type}) of this {config.model_type} model is trained and saved",
        stacklevel=3,
    )
    text = copy.deepcopy(text)
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return how many token ids a causal model both takes and gives.

    The rows of its input embedding or of its head, whichever are fewer: a config may name several vocabularies.
    """
    ends: tuple[nn.Module | None, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
    return min(end.get_parameter("weight").shape[0] for end in ends if end is not None)


def position_limit(config: PretrainedConfig) -> int | None:
    """Return the longest sequence that a model takes; None where its config sets no limit (some say so by -1)."""
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def _causal_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that transformers makes of a config, or that was registered for it."""
    known: object = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return known if isinstance(known, type) and issubclass(known, PreTrainedModel) else None


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the causal language model of `config` on the meta device, in training mode; UserError if it has none.

    Also where it has not the implementation of attention that the config asks for.
    """
    config = copy.deepcopy(config)
    config.use_cache = False
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # asked for where it can be had: at the end of the forward (`routing.py`)
    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # a family may make of its config what it likes
        reason = _reason(error)
        if (wanted := attention_of(config)) and "attention implementation" in reason:
            raise UserError(
                f"{reason.partition(' yet.')[0]}: use another --attn_implementation than {wanted}"
            ) from error
        raise UserError(f"model type {config.model_type!r} cannot be trained as a causal decoder: {reason}") from error
    model: PreTrainedModel = built.train()
    return model
