"""LoRA through peft: its layers in a skeleton, their initial values, their names in files, and checksums of the base.

peft itself creates the layers, on the meta device, so they are those of `get_peft_model`. Modules in `modules_to_save`
are trained whole and keep their own names in the model; peft's frozen copy of them is dropped. peft is imported only
here, and only if adapters are used.

Checkpoints of adapters have checksums of the base model, so that a run does not resume them on another one. A path or a
config would not suffice: the model may have been moved, and a fine-tuned model has the config of its origin.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from harness.atomic import replaced_files
from harness.checkpoint.exporting.model_files import hide_secrets, set_aside_model
from harness.console import warn
from harness.errors import UserError, headline
from harness.extras.dora import initial_magnitudes, own_magnitudes
from harness.extras.lora_cut import adapters_removed, cut_with_adapters
from harness.extras.quantized.base import Quantization, QuantizedWeights
from harness.hf.adapters import NAME, PREFIX, plain_name, saved_name
from harness.hf.layers.dry_run import CANNOT_RUN
from harness.hf.layers.wrappers import Wrapper, is_wrapper, without_adapters
from harness.hf.skeleton import ModelSource, forget_broken_ties, require_plain, skeleton_of
from harness.hf.weights.layer_weights import ModelWeights, NoValues, WeightSource, fill_local
from harness.hf.weights.lazy_tensor import LazyTensor
from harness.hf.weights.tensor_files import Stored, open_tensors
from harness.parallel.comm import TensorParallel
from harness.parallel.generators import own_generators
from harness.parallel.plans.plan import Plan
from harness.parallel.token_exchange import Neighbours
from harness.training.prepare.trainable import Model, model_source

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

INSTALL = "peft is not installed: pip install 'ds-harness[peft]'"
# fields of peft's LoraConfig that may differ from their default; others would need the base weights or other layers
SUPPORTED = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "runtime_config", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
        *("rank_pattern", "alpha_pattern", "target_modules", "target_parameters", "exclude_modules", "layers_pattern"),
        *("layers_to_transform", "fan_in_fan_out", "bias", "lora_bias", "init_lora_weights", "modules_to_save"),
        "ensure_weight_tying",
    }
)
WHOLE = 1 << 18  # a tensor up to this number of elements is read whole
# of a larger one, this many blocks of this many elements are read
BLOCKS = 8
BLOCK = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """The adapters that are trained instead of a model's own weights.

    Attributes:
        config: peft's LoraConfig.
        tensors: values of adapters by name in the model; others are initialised by peft's rule (A random, B zero).
        trained: whether a parameter is trained, by name in the model; by peft's rule for those that are not named.
        replaced: names of weights in `modules_to_save` whose copy has other values than the base model.
        quantization: of the frozen weights; None if they stay as they are.
    """

    config: LoraConfig
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    trained: Mapping[str, bool] = field(default_factory=dict)
    replaced: frozenset[str] = frozenset()
    quantization: Quantization | None = None

    @property
    def rank(self) -> int:
        """The rank of the adapters' matrices."""
        return int(self.config.r)

    def inject(self, model: PreTrainedModel, *, keep_ties: bool) -> None:
        """See `inject`."""
        if self.quantization is not None:
            self.quantization.mark(model)
        inject(model, self, keep_ties=keep_ties)

    def weights(self, base: ModelWeights, seed: int) -> WeightSource:
        """Return the weights of layers with adapters: the layers' own from `base`."""
        filled: WeightSource = base
        if self.quantization is not None:
            filled = QuantizedWeights(base=base, settings=self.quantization)
        has_values = not isinstance(base, NoValues)
        return AdaptedWeights(model=base, base=filled, adaptation=self, seed=seed if has_values else None)

    def cut(
        self,
        layer: nn.Module,
        plan: Plan,
        tensor: TensorParallel,
        config: PretrainedConfig,
        *,
        local_logits: bool,
        neighbours: Neighbours,
    ) -> None:
        """See `cut_with_adapters`."""
        cut_with_adapters(layer, plan, tensor, config, local_logits=local_logits, neighbours=neighbours)

    def fingerprint(self, base_seed: int | None = None) -> str:
        """Return the settings as JSON, equal for runs that can resume each other's checkpoints.

        Args:
            base_seed: seed of a base model without weights of its own, else None.
        """
        other = {"base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config"}
        stated = sorted_config(self.config).to_dict()
        shaping = {key: stated[key] for key in sorted(stated) if key not in other}
        quantized = {} if self.quantization is None else {"quantization": self.quantization.as_json()}
        return json.dumps({**shaping, **quantized, "base_seed": base_seed}, default=str)

    def base_checksums(self, source: ModelSource) -> dict[str, str]:
        """See `base_checksums`; modules that are trained whole are left out."""
        return base_checksums(source, self.config.modules_to_save or ())

    def write_config(self, base: str, directory: Path) -> None:
        """Write adapter_config.json for adapters on the model at `base`; another model is moved away."""
        set_aside_model(directory, base)
        config = sorted_config(self.config)
        config.base_model_name_or_path = base
        config.inference_mode = True
        with replaced_files(directory) as folder:
            config.save_pretrained(str(folder))
            hide_secrets(folder)


def adapted(
    model: object, peft_config: LoraConfig | None, quantization_config: BitsAndBytesConfig | None = None
) -> tuple[ModelSource | None, Adaptation | None]:
    """Return the source of a decoder (None for a list of layers) and its adapters.

    Adapters are those of a model in memory, or new ones by `peft_config`. Raises UserError if both are given, for
    adapters on a list of layers, and for a base that cannot be quantised.
    """
    source, adaptation = _adapted(model, peft_config)
    if quantization_config is None:
        return source, adaptation
    if adaptation is None:
        raise UserError(
            "weights in 4 bits cannot be trained, only adapters on them: add --use_peft (peft_config=LoraConfig(...)), "
            "or remove --load_in_4bit (quantization_config)"
        )
    if source is None or not isinstance(source.weights, Path):
        raise UserError(
            "--load_in_4bit needs the directory of a model with weights, which the adapters name as their base: save "
            "the model first"
        )
    if adaptation.config.use_dora:
        raise UserError("--load_in_4bit: DoRA needs the norms of weights that are not quantised: remove --use_dora")
    return source, replace(adaptation, quantization=Quantization.of(quantization_config))


def _adapted(model: object, peft_config: LoraConfig | None) -> tuple[ModelSource | None, Adaptation | None]:
    found = adapted_model(model)
    if found is not None:
        if peft_config is not None:
            raise UserError(
                "peft_config needs a model without adapters, but this one has some: give only one of the two"
            )
        return found
    source = model_source(cast("Model", model))
    if peft_config is None:
        return source, None
    if source is None:
        raise UserError("peft_config needs a HuggingFace model, not a list of layers")
    return source, Adaptation(config=lora_config(peft_config))


def lora_config(given: object) -> LoraConfig:
    """Check peft's LoraConfig `given`, and return a copy. Raises UserError for settings that are not supported."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError(INSTALL) from error
    if type(given) is not LoraConfig:
        raise UserError(f"peft_config is a {type(given).__name__}, but only peft's LoraConfig is supported")
    plain = LoraConfig()
    other = [
        item.name
        for item in fields(LoraConfig)
        if item.name not in SUPPORTED and getattr(given, item.name) != getattr(plain, item.name)
    ]
    if other:
        raise UserError(f"peft_config: {other[0]} is not supported: leave it at its default")
    if given.init_lora_weights not in (True, "gaussian"):
        raise UserError(
            f"peft_config: init_lora_weights {given.init_lora_weights!r} is not supported: use True or 'gaussian'"
        )
    return copy.deepcopy(given)


def adapted_model(model: Any) -> tuple[ModelSource, Adaptation] | None:
    """Return source and adaptation of a model in memory with adapters; None for a model without.

    Such a model is a PeftModel, or one that transformers has loaded from an adapter's directory. The base model's own
    modules are trained, as without adapters, and parameters of it that are not frozen. If nothing at all is trained,
    the adapters were loaded for inference, and are trained.

    Raises:
        UserError: not exactly one adapter is active, adapters are merged or disabled, the config is not supported, or
            the layers with adapters are not those that peft makes of it.
    """
    peft = sys.modules.get("peft")  # without it no model has adapters
    if peft is not None and isinstance(model, peft.PeftModel):
        base = model.get_base_model()
        active = model.active_adapters
    elif getattr(model, "_hf_peft_config_loaded", False):
        base = model
        active = model.active_adapters()
    else:
        return None
    if len(active) != 1:
        raise UserError(f"active adapters: {', '.join(active) or 'none'}: select the one to train with set_adapter()")
    (name,) = active
    require_plain(model)
    _require_in_use(base)
    source = ModelSource.of_model(base)
    weights: dict[str, Tensor] = {}
    adapters: dict[str, Tensor] = {}
    trained: dict[str, bool] = {}
    for key, tensor in cast(dict[str, Tensor], source.weights).items():
        if is_adapter(key):
            if f".{name}." in key:
                adapters[key.replace(f".{name}.", f".{NAME}.")] = tensor
        elif ".modules_to_save." not in key:
            weights[plain_name(key).replace(".original_module.", ".")] = tensor
            trained[key.replace(".original_module.", ".")] = tensor.requires_grad
    replaced = set()
    for key, tensor in cast(dict[str, Tensor], source.weights).items():
        if f".modules_to_save.{name}." in key:
            own = key.replace(f".modules_to_save.{name}.", ".")
            if not torch.equal(weights[own], tensor):
                replaced.add(own)
            weights[own] = tensor
            trained[own] = tensor.requires_grad
    if not any(tensor.requires_grad for tensor in model.parameters()):
        trained = {}
    elif frozen := sorted(key for key, tensor in adapters.items() if not tensor.requires_grad):
        raise UserError(f"{frozen[0]} is frozen, but an adapter is trained as a whole: set its requires_grad")
    config = lora_config(model.peft_config[name])
    adaptation = Adaptation(config=config, tensors=adapters, trained=trained, replaced=frozenset(replaced))
    plain = _without_adapters(base, name)
    _require_as_configured(base, name, plain, adaptation)
    return replace(source, weights=weights, model=plain), adaptation


def _without_adapters(base: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return a copy of a model on meta without peft's layers, and with the adapter's copies of modules_to_save."""
    from peft.utils import ModulesToSaveWrapper

    plain = skeleton_of(base, base.config)
    for path, module in list(plain.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            is_of_this = name in module.modules_to_save
            plain.set_submodule(path, module.modules_to_save[name] if is_of_this else module.original_module)
        elif is_wrapper(module) and not path.endswith(".base_layer"):
            plain.set_submodule(path, without_adapters(module))
    for mark in ("peft_config", "_hf_peft_config_loaded"):
        vars(plain).pop(mark, None)
    forget_broken_ties(plain)
    return plain


def _require_in_use(model: nn.Module) -> None:
    """Raise UserError for a layer whose adapters are merged into its weights, or disabled."""
    for path, wrapper in _wrappers(model):
        if wrapper.merged:
            raise UserError(f"{path}: its adapters are merged into its weights: unmerge them first")
        if wrapper.disable_adapters:
            raise UserError(f"{path}: its adapters are disabled: enable them first")


def _require_as_configured(base: PreTrainedModel, name: str, plain: PreTrainedModel, adaptation: Adaptation) -> None:
    """Raise UserError for a layer with adapters that peft would not make of the config: its settings were changed."""
    made = copy.deepcopy(plain)
    inject(made, replace(adaptation, config=copy.deepcopy(adaptation.config)), keep_ties=False)
    given = _settings(base, name)
    expected = _settings(made, NAME)
    for path in sorted(given.keys() ^ expected.keys()):
        raise UserError(
            f"{path}: the adapter's config {'adapts' if path in expected else 'does not adapt'} it, unlike the model"
        )
    for path, settings in given.items():
        for setting, value in settings.items():
            if value != expected[path][setting]:
                raise UserError(
                    f"{path}: its {setting} is {value}, but the adapter's config makes {expected[path][setting]}: "
                    "change the config before get_peft_model"
                )


def _settings(model: nn.Module, name: str) -> dict[str, dict[str, str]]:
    """Return the settings of the adapter `name` as text, by the layer that it adapts; other adapters may differ."""
    return {
        path: {
            "class": type(wrapper).__name__,
            "scaling": str(wrapper.scaling[name]),
            **{part: repr(getattr(wrapper, part)[name]) for part in ("lora_A", "lora_B", "lora_dropout")},
        }
        for path, wrapper in _wrappers(model)
        if name in wrapper.lora_A
    }


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Wrapper]]:
    return ((path, module) for path, module in model.named_modules() if is_wrapper(module))


def inject(model: PreTrainedModel, adaptation: Adaptation, *, keep_ties: bool) -> None:
    """Put peft's layers into `model`, on meta, and freeze the rest; peft fills the open fields of the config.

    Args:
        keep_ties: whether tied weights must stay tied, because the checkpoint has values for only one of them.

    Raises:
        UserError: no module fits the targets, one that fits is not a linear layer or shares its weight, or tied
            weights would be untied.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = adaptation.config
    config.inference_mode = False
    tied = _tied(model)
    try:
        inject_adapter_in_model(config, model, adapter_name=NAME, low_cpu_mem_usage=True)
    except (ValueError, TypeError, re.error) as error:
        raise _unfit(model, headline(error)) from error
    shared = {name: other for pair in tied for name, other in (pair, pair[::-1])}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and (other := shared.get(f"{plain_name(name)}.weight")):
            raise UserError(
                f"{name} shares its weight with {other}, which merged adapters would change too: remove it from the "
                "target modules (--lora_target_modules), or untie the weights of the model"
            )
        if isinstance(module, BaseTunerLayer) and type(module) not in (Linear, ParamWrapper):
            kind = type(module.get_base_layer()).__name__
            raise UserError(
                f"{name} is a {kind}, but LoRA supports only linear layers and experts: remove it from the target "
                "modules, or add it to modules_to_save to train it fully"
            )
        if type(module) is Linear and not _is_linear(module.base_layer):
            raise UserError(
                f"{name} is a {type(module.base_layer).__name__}, whose output is not that of a linear layer: remove "
                "it from the target modules (--lora_target_modules)"
            )
    _require_found(model, config)
    _train_whole(model)
    own_magnitudes(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(adaptation.trained.get(name, parameter.requires_grad))
    if lost := _lost_when_loaded(model, config):
        warn(
            f"peft cannot load adapters of {lost} of a {model.config.model_type} model again, because it changes their "
            "names when it reads them: leave them out of the target modules (--lora_target_modules)"
        )
    for name, other in sorted(tied - _tied(model)) if keep_ties else ():
        raise UserError(
            f"modules_to_save would untie {name} from {other}: set "
            "ensure_weight_tying=True in peft's LoraConfig to keep them tied"
        )


def _unfit(model: PreTrainedModel, reason: str) -> UserError:
    """Return the error for targets that peft refuses for that reason."""
    advice = "all-linear selects every linear layer except the head"
    if "ParamWrapper" in reason:
        reason, advice = "peft has no DoRA for experts", "name linear layers, such as q_proj v_proj"
    return UserError(
        f"model type {model.config.model_type!r} does not fit these LoRA targets: {reason} (--lora_target_modules: "
        f"{advice})"
    )


@torch.no_grad()
def _is_linear(layer: Any) -> bool:
    """Return whether a linear layer (on meta) with a forward of its own still maps [..., in] to [..., out]."""
    if type(layer).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    try:
        output = layer(torch.empty(1, 2, layer.in_features, device=layer.weight.device))
    except CANNOT_RUN:
        return False
    return isinstance(output, Tensor) and output.shape == (1, 2, layer.out_features)


def _tied(model: PreTrainedModel) -> set[tuple[str, str]]:
    """Return pairs of names, without adapters, of the same parameter."""
    parameters = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    ties = model.all_tied_weights_keys
    return {(name, other) for name, other in ties.items() if parameters.get(name) is parameters.get(other)}


def _lost_when_loaded(model: PreTrainedModel, config: LoraConfig) -> str:
    """Return a layer whose adapters peft would read under another name than that they are saved under; "" if none."""
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    saved = {saved_name(name): each for name, each in model.named_parameters() if is_adapter(name)}
    read = convert_peft_adapter_state_dict_for_transformers(model, config, dict(saved), NAME)
    lost = (name for name, each in saved.items() if read.get(name) is not each)
    return next((name.removeprefix(PREFIX).partition(".lora_")[0] for name in lost), "")


def _require_found(model: PreTrainedModel, config: LoraConfig) -> None:
    """Raise UserError for `modules_to_save` that the model lacks, which peft ignores; warn of missing target modules.

    Missing targets are no error, because one list of targets may serve several families.
    """
    names = [f".{plain_name(name)}" for name, _ in model.named_modules()]
    for name in sorted(config.modules_to_save or ()):
        if not any(known.endswith(name) for known in names):
            raise UserError(f"modules_to_save: this {model.config.model_type} model has no module named {name}")
    targets = config.target_modules
    lost = [] if isinstance(targets, str) else [n for n in targets or () if not any(k.endswith(f".{n}") for k in names)]
    if lost:
        warn(f"LoRA: this {model.config.model_type} model has no module named {', '.join(sorted(lost))}")


def _train_whole(model: PreTrainedModel) -> None:
    """Give the modules of `modules_to_save` their own names in the model, and train them."""
    from peft.utils import ModulesToSaveWrapper

    wrapped = [(name, module) for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    for name, wrapper in wrapped:
        model.set_submodule(name, wrapper.modules_to_save[NAME])


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name belongs to an adapter."""
    return ".lora_" in name


def sorted_config(config: LoraConfig) -> LoraConfig:
    """Return a copy of peft's config whose sets are sorted lists: the same on every process."""
    config = copy.copy(config)
    for key, value in vars(config).items():
        if isinstance(value, (set, frozenset)):
            setattr(config, key, sorted(value))
    return config


@dataclass(frozen=True, kw_only=True)
class AdaptedWeights:
    """The weights of layers with adapters: the layers' own from `base`, the adapters' from `adaptation` or the seed.

    Without a seed, as in a dry run, adapters get no values. `model` has the weights of `base` before it quantises them.
    """

    model: ModelWeights
    base: WeightSource
    adaptation: Adaptation
    seed: int | None

    @torch.no_grad()
    def fill(self, layer: nn.Module, whole: nn.Module) -> None:
        """Fill the layer as if it had no adapters, then fill the adapters."""
        with adapters_removed(layer), adapters_removed(whole):
            self.base.fill(layer, whole)
        if self.seed is None:
            return
        initial = self._drawn(layer, whole) | initial_magnitudes(layer, whole, self.model)
        for name, parameter in layer.named_parameters():
            value = self.adaptation.tensors.get(name, initial.get(name))
            if value is not None:
                fill_local(parameter, value)

    def _drawn(self, layer: nn.Module, whole: nn.Module) -> dict[str, Tensor]:
        """Return the uncut A and B as peft draws them; the random numbers depend on the seed and on the layer's
        name."""
        device = next(layer.parameters()).device
        tensors = {}
        for name, wrapper in _wrappers(whole):
            scratch = copy.deepcopy(wrapper)
            scratch.base_layer = nn.Identity()
            scratch.to_empty(device=device)
            digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
            with own_generators(int.from_bytes(digest[:8], "little"), device):
                scratch.reset_lora_parameters(NAME, self.adaptation.config.init_lora_weights)
            tensors.update({f"{name}.{key}": value for key, value in scratch.named_parameters()})
        return tensors


def base_checksums(source: ModelSource, trained: Sequence[str] = ()) -> dict[str, str]:
    """Return name -> CRC-32 in hex of the base model's weights; empty for a base that is initialised from the seed.

    Args:
        trained: names of modules that are trained whole, whose weights are left out.

    Raises:
        UserError: a file of weights cannot be read.
    """
    if not source.has_values:
        return {}
    if isinstance(source.weights, Path):
        return stored_checksums(source.weights, trained)
    return _checksums(
        {name: each for name, each in (source.weights or {}).items() if isinstance(each, nn.Parameter)}, trained
    )


def stored_checksums(directory: Path, trained: Sequence[str] = ()) -> dict[str, str]:
    """Return the checksums of the weights in a directory; see `base_checksums`."""
    return _checksums(open_tensors(directory).tensors, trained)


def _checksums(tensors: Mapping[str, Tensor], trained: Sequence[str]) -> dict[str, str]:
    base = {name: tensor for name, tensor in tensors.items() if not any(f".{part}." in f".{name}." for part in trained)}
    return {name: f"{_checksum(tensor):08x}" for name, tensor in sorted(base.items())}


def _checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a small tensor's values, or of a few blocks of a large one: a whole model takes minutes.

    Values are converted to float32 first, so that the same model in memory, in a wider dtype, has the same checksum.
    """
    total = 0
    count = tensor.numel()
    last = max(count - BLOCK, 0)
    spans = [(0, count)] if count <= WHOLE else [(at := last * n // (BLOCKS - 1), at + BLOCK) for n in range(BLOCKS)]
    for start, stop in spans:
        values = _elements(tensor, start, stop).to("cpu", torch.float32).contiguous()
        total = zlib.crc32(values.numpy().data, total)
    return total


def _elements(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return elements `start` to `stop` - 1 of a flattened tensor."""
    if not isinstance(tensor, LazyTensor):
        return tensor.detach().reshape(-1)[start:stop]
    (leaf,) = tensor.leaves()
    if isinstance(leaf, Stored):
        found = torch.empty(stop - start, dtype=leaf.dtype)
        if stop > start:
            leaf.file.read_into(found, leaf.start + start * leaf.dtype.itemsize)
        return found
    whole = torch.empty(leaf.shape, dtype=leaf.dtype)
    tensor.read_into(whole)
    return whole.reshape(-1)[start:stop]
