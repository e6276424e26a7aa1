"""Make the inputs of a composition: a tiny random model in a directory, samples, a DeepSpeed JSON, the arguments."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from harness.arguments import TrainingArguments
from harness.config.values.json_object import JsonObject
from harness.data.tokenizer import ByteTokenizer
from harness.errors import UserError
from harness.hf.skeleton import read_source, text_decoder
from harness.hf.unbuilt import vocabulary_size
from harness.optimizers import DEFAULT, OPTIMIZERS
from harness.verify.shrink import parts_of
from harness.verify.tiny_copy import MOST_PARAMETERS, shrink, tiny_config, tiny_model
from harness.verify.trials.composition import Composition, Execution, Training

if TYPE_CHECKING:
    from peft import PeftModel

TEXT = b"Sphinx of black quartz, judge my vow; 0123456789 + 9876543210. The five boxing wizards jump quickly? "
EVALUATED = 5
PROMPTS = ("Sphinx of", "98765")
VOCABULARY = "vocabulary"
Sample: TypeAlias = dict[str, list[int]]
SAMPLED = 4  # number of tokens by which each prompt is continued
SCALE_POWER = 8  # of fp16's loss scale: large enough for small gradients, small enough that no step overflows


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A tiny model on disk, and its samples.

    Attributes:
        base: a HuggingFace directory.
        adapters: peft's directory of adapters that are not zero; None without adapters.
        vocabulary: number of ids of the model.
    """

    training: Training
    base: Path
    adapters: Path | None
    vocabulary: int

    def trained(self) -> list[Sample]:
        """Return the training samples: two and a half batches, so that a step reaches into the next epoch."""
        return samples(self.training, 5 * self.training.batch // 2, self.vocabulary)

    def evaluated(self) -> list[Sample]:
        """Return the evaluation samples; for a model with a router loss exactly one micro-batch."""
        return samples(self.training, 8 if self.training.router else EVALUATED, self.vocabulary, offset=100)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts that are continued at each evaluation; none if the model has fewer ids than there are bytes."""
        return PROMPTS if self.training.evaluate and self.vocabulary >= len(ByteTokenizer()) else ()


def make_subject(composition: Composition, folder: Path) -> Subject:
    """Write the model of a composition below `folder`, once. UserError for a family without a tiny model that runs."""
    training = composition.training
    shape = {name: getattr(training, name) for name in ("config", "dropout", "lora", "seed", "router")}
    model_folder = (
        folder / hashlib.sha256(f"{composition.model} {json.dumps(shape, sort_keys=True)}".encode()).hexdigest()[:16]
    )
    if not model_folder.exists():
        made = model_folder.with_suffix(".part")
        shutil.rmtree(made, ignore_errors=True)
        model = tiny_model(_config(composition), seed=training.seed)
        model.save_pretrained(made / "base")
        (made / VOCABULARY).write_text(str(vocabulary_size(model)))
        if training.lora:
            _save_adapters(_adapted(model, training), made)
        made.rename(model_folder)
    return Subject(
        training=training,
        base=model_folder / "base",
        adapters=model_folder / "adapters" if training.lora else None,
        vocabulary=int((model_folder / VOCABULARY).read_text()),
    )


def _config(composition: Composition) -> PretrainedConfig:
    """Return the config of the tiny model, made from a family or from a directory; a tiny directory's own is kept."""
    training, family = composition.training, composition.model
    config = copy.deepcopy(_tiny(family) if family in CONFIG_MAPPING else _of_directory(family))
    fields = {**config.to_dict(), **training.config}
    for part in parts_of(fields):
        for name, value in part.items():
            if "drop" in name and isinstance(value, float) and "layerdrop" not in name:
                part[name] = training.dropout
    if training.router or fields.get("output_router_logits"):
        fields["output_router_logits"] = bool(training.router)
    if training.router:
        fields["router_aux_loss_coef"] = training.router
    made: PretrainedConfig = type(config).from_dict(fields)
    made.use_cache = False
    vars(made).update({key: value for key, value in vars(config).items() if key.startswith("base_model_")})
    return made


@cache
def _of_directory(name: str) -> PretrainedConfig:
    config = read_source(name).config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    return shrink(config, tensor=2) if size > MOST_PARAMETERS else config


@cache
def _tiny(family: str) -> PretrainedConfig:
    config = tiny_config(family, tensor=2)
    text = text_decoder(config)
    if text.model_type != family and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(f"{family} is multimodal; its text decoder is listed as its own family")
    return text


def _adapted(model: PreTrainedModel, training: Training) -> PeftModel:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=training.lora,
        lora_alpha=2 * training.lora,
        lora_dropout=training.dropout,
        target_modules="all-linear",
    )
    adapted: PeftModel = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(training.seed + 1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:  # peft initialises B to 0, so no gradient would reach A
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return adapted


def _save_adapters(model: PeftModel, model_folder: Path) -> None:
    """Save the adapters next to the base model. UserError if peft does not load them again.

    For some models (Laguna's shared experts) peft renames modules when it saves, and when it loads it leaves their
    adapters as initialised, with only a warning.
    """
    from peft import PeftModel

    model.save_pretrained(str(model_folder / "adapters"))
    base = AutoModelForCausalLM.from_pretrained(model_folder / "base", local_files_only=True)
    again = dict(PeftModel.from_pretrained(base, str(model_folder / "adapters")).named_parameters())
    saved = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    if lost := [name for name, parameter in saved.items() if not torch.equal(parameter, again[name])]:
        raise UserError(f"peft does not load the adapter that it has saved: {lost[0]} ({len(lost)} in all)")


# -- samples -----------------------------------------------------------------------------------------------


def samples(training: Training, count: int, vocabulary: int, offset: int = 0) -> list[Sample]:
    """Return samples in the form `training.data`; ids are the bytes of a text, because noise would teach nothing.

    Raises UserError for a form that does not exist.
    """
    generator = torch.Generator().manual_seed(training.seed + offset)
    n = training.length
    found = []
    for row in range(offset, offset + count):
        start = row * (n + 3) % len(TEXT)
        ids = [byte % vocabulary for byte in (TEXT * (n // len(TEXT) + 2))[start : start + n]]
        some = int(torch.randint(1, n // 2, (), generator=generator))
        sample: Sample = {"input_ids": ids}
        if training.data == "masked":
            sample["labels"] = [-100] * (2 * some) + ids[2 * some :]
        elif training.data == "padded":
            kept = n - some
            sample |= {"input_ids": ids[:kept] + [0] * some, "attention_mask": [1] * kept + [0] * some}
        elif training.data == "packed":
            sample["position_ids"] = [*range(some + 1), *range(n - some - 1)]
        elif training.data != "blocks":
            raise UserError(f"composition: data={training.data}: it must be blocks, masked, padded or packed")
        found.append(sample)
    return found


# -- config and arguments ----------------------------------------------------------------------------------


def deepspeed_config(training: Training, execution: Execution) -> JsonObject:
    """Return the DeepSpeed JSON of an execution."""
    pipeline: JsonObject = {"stages": execution.pp, "activation_checkpoint_interval": execution.recompute}
    if execution.pp > 1:
        pipeline |= {"schedule": execution.schedule, "partition": execution.partition}
        pipeline |= {"chunks_per_stage": execution.chunks} if execution.chunks else {}
    tensor: JsonObject = {"autotp_size": execution.tp}
    zero: JsonObject = {"stage": execution.zero}
    if execution.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if execution.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    config: JsonObject = {
        "train_batch_size": training.batch,
        "train_micro_batch_size_per_gpu": training.micro,
        "gradient_clipping": training.clip,
        "zero_optimization": zero,
        "pipeline": pipeline,
        "tensor_parallel": {**tensor, **({"sequence_parallel": True} if execution.sequence else {})},
    }
    if training.precision != "fp32":
        config[training.precision] = {"enabled": True}
    if training.precision == "fp16":
        config["fp16"]["initial_scale_power"] = SCALE_POWER
    if training.sums:
        config["data_types"] = {"grad_accum_dtype": training.sums}
    if training.optimizer:
        config["optimizer"] = {
            "type": training.optimizer,
            "params": {**trial_options(training), "weight_decay": training.decay},
        }
        config["zero_allow_untested_optimizer"] = True  # refused without
    if execution.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": execution.ep}
    if execution.cp > 1:
        config["context_parallel"] = {"size": execution.cp}
    if execution.bits:
        config["gradient_compression"] = {"bits": execution.bits}
    if execution.compile:
        config["compile"] = {"enabled": True, "backend": execution.compile}
    return _merged(config, execution.rest)


def trial_options(training: Training) -> JsonObject:
    """Return the options of the training's optimizer but for its weight decay."""
    optimizer = OPTIMIZERS[training.optimizer] if training.optimizer else DEFAULT
    options: JsonObject = {"lr": 1.0, **(optimizer.trial or {})}
    return {**options, "lr": training.rate * options["lr"]}


def _merged(config: JsonObject, more: JsonObject) -> JsonObject:
    found = dict(config)
    for name, value in more.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = _merged(found[name], value) if both else value
    return found


def arguments(training: Training, execution: Execution, output_dir: Path, prompts: Path | None) -> TrainingArguments:
    """Return the arguments of an execution that writes to `output_dir`; `prompts` is a file of prompts."""
    options = trial_options(training)
    given: JsonObject = {
        "deepspeed_config": deepspeed_config(training, execution),
        "output_dir": str(output_dir),
        "max_steps": training.steps,
        "learning_rate": options["lr"],
        "lr_scheduler_type": training.scheduler,
        "warmup_steps": training.warmup,
        "weight_decay": training.decay,
        "seed": training.seed,
        "logging_steps": 1,
        "save_steps": 0,
        "label_smoothing_factor": training.smoothing,
        "hang_seconds": 0,
    }
    if not training.optimizer:
        given |= {"adam_beta2": options["betas"][1], "adam_epsilon": options["eps"]}
    if training.attention:
        given["attn_implementation"] = training.attention
    if training.evaluate:
        given |= {"eval_strategy": "steps", "eval_steps": training.evaluate}
    if prompts is not None:
        given |= {"sample_prompts": str(prompts), "sample_tokens": SAMPLED}
    return TrainingArguments(**given)
