"""The arguments of a run, named and defaulted as in HuggingFace's TrainingArguments and run_clm.py.

A dataclass is the one list of flags: the command line is made from it. Neither torch nor transformers is imported,
so that a wrong argument is refused at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, get_type_hints

from harness.config import AutoValues
from harness.errors import UserError
from harness.training.hf_names import SETTINGS, refuse_arguments

if TYPE_CHECKING:
    from peft import LoraConfig

# transformers' schedules that need nothing but the number of steps and of warm-up steps
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)
NONFINITE = ("stop", "skip", "warn", "rollback")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
LEAST = {"max_steps": -1, "logging_steps": 1, "save_steps": 0, "warmup_steps": 0, "hang_seconds": 0}
AT_LEAST_ONE = (
    "eval_steps",
    "save_total_limit",
    "rebalance_steps",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "expert_parallel_size",
)


def flag(default: object, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class TrainingArguments:
    """How to train. Where the DeepSpeed JSON says "auto", or nothing, the value comes from here."""

    _given: ClassVar[frozenset[str]] = frozenset()  # names that were passed; set on each instance

    deepspeed_config: str | Mapping[str, Any] | None = flag(None, "DeepSpeed JSON: a file or a preset's name")
    output_dir: str = flag("runs/default", "where checkpoints, metrics and the trained model go")
    resume_from_checkpoint: str | None = flag(
        None, "auto: the newest whole checkpoint in output_dir; or a checkpoint's path"
    )
    block_size: int | None = flag(
        None, "tokens per sample of text or conversations (default: the model's length, at most 1024)"
    )
    packing: bool = flag(False, "pack whole documents into blocks; attention stays within each document")
    max_steps: int = flag(-1, "optimizer steps; -1: as many as num_train_epochs needs")
    num_train_epochs: float = flag(3.0, "passes through the data, unless max_steps is given")
    per_device_train_batch_size: int = flag(8, "samples per micro-batch")
    per_device_eval_batch_size: int | None = flag(
        None, "samples per evaluation micro-batch (default: as in training; with a router loss 8)"
    )
    gradient_accumulation_steps: int = flag(1, "micro-batches per step on each data-parallel rank")
    global_batch_size: int | None = flag(
        None, "samples per step over all ranks, in every layout; sets the accumulation"
    )
    learning_rate: float = flag(5e-5, "peak learning rate")
    lr_scheduler_type: str = flag("linear", ", ".join(SCHEDULES))
    warmup_steps: float = flag(0, "steps of linear warm-up; below 1: the fraction of all steps")
    weight_decay: float = flag(0.0, "AdamW's weight decay; not applied to biases and norms")
    adam_beta1: float = flag(0.9, "AdamW's beta1")
    adam_beta2: float = flag(0.999, "AdamW's beta2")
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon")
    output_router_logits: bool | None = flag(
        None, "add the model's router loss (mixture of experts) to the loss; default: as its config says"
    )
    router_aux_loss_coef: float | None = flag(None, "factor of the router loss (default: the model's own)")
    max_grad_norm: float = flag(1.0, "clip gradients to this norm; 0: no clipping")
    nonfinite: str = flag(
        "stop",
        "if a loss, gradient or weight is not finite: stop the run, skip the step, warn and continue, or rollback to "
        "the last checkpoint and leave out the batch",
    )
    hang_seconds: float = flag(
        30.0,
        "end a run in which no rank makes progress for so long, or for 5 steps if that is longer; 0: wait for ever",
    )
    bf16: bool = flag(False, "train in bfloat16")
    fp16: bool = flag(False, "train in float16 with loss scaling")
    attn_implementation: str | None = flag(
        None, "eager, sdpa, flash_attention_2 or flash_attention_3; default: the config.json's, else sdpa or eager"
    )
    seed: int = flag(42, "seed of initial weights, sample order and dropout")
    logging_steps: int = flag(500, "steps between log events")
    eval_steps: int | None = flag(None, "steps between evaluations (default: no evaluation during training)")
    save_steps: int = flag(500, "steps between checkpoints; the last step also saves one; 0: no checkpoints")
    save_seconds: float | None = flag(None, "also save when so many seconds have passed since the last checkpoint")
    save_total_limit: int | None = flag(None, "number of newest checkpoints to keep (default: all)")
    rebalance_steps: int | None = flag(
        None, "steps between comparisons of the pipeline's stages; layers move where that saves more than 5% of a step"
    )
    report_to: str = flag("none", "none, or a comma-separated list of tensorboard, wandb, csv")
    allow_ignored_keys: bool = flag(False, "run even if a key of the JSON looks like a misspelling of a known one")
    pipeline_parallel_size: int | None = flag(None, "pipeline stages; overrides pipeline.stages")
    tensor_parallel_size: int | None = flag(None, "tensor-parallel ranks; overrides tensor_parallel.autotp_size")
    expert_parallel_size: int | None = flag(
        None, "tensor-parallel ranks that divide the experts among them; overrides expert_parallel.autoep_size"
    )
    verify_plan: str = flag(
        "auto", "test the sharding on a tiny copy first: on, off, or auto (only for families outside the tested matrix)"
    )

    def __new__(cls, **given: Any) -> TrainingArguments:
        unknown = given.keys() - {item.name for item in fields(cls)}
        refuse_arguments(sorted(unknown), cls.__init__, SETTINGS, cls.__name__)
        self = super().__new__(cls)
        # also where the value is the default: it may contradict the JSON
        object.__setattr__(self, "_given", frozenset(given))
        return self

    def __post_init__(self) -> None:
        self.output_dir = str(Path(self.output_dir).absolute())  # wherever the run may change its directory to
        if self.resume_from_checkpoint is not None and self.resume_from_checkpoint != "auto":
            self.resume_from_checkpoint = str(Path(self.resume_from_checkpoint).absolute())
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least {least}")
        if self.max_steps == 0:
            raise UserError("--max_steps 0: must be at least 1, or -1 to train for --num_train_epochs")
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} {value}: must be at least 1")
        if self.save_seconds is not None and not self.save_seconds > 0:
            raise UserError(f"--save_seconds {self.save_seconds}: must be above 0")
        if self.lr_scheduler_type not in SCHEDULES:
            raise UserError(f"--lr_scheduler_type {self.lr_scheduler_type}: not one of {', '.join(SCHEDULES)}")
        if self.attn_implementation not in (None, *ATTENTION):
            raise UserError(f"--attn_implementation {self.attn_implementation}: not one of {', '.join(ATTENTION)}")
        if self.verify_plan not in ("auto", "on", "off"):
            raise UserError(f"--verify_plan {self.verify_plan}: not one of auto, on, off")
        if self.nonfinite not in NONFINITE:
            raise UserError(f"--nonfinite {self.nonfinite}: not one of {', '.join(NONFINITE)}")
        unknown = set(self.reporters()) - {"tensorboard", "wandb", "csv"}
        if unknown:
            raise UserError(
                f"--report_to {self.report_to}: {sorted(unknown)[0]} is not one of tensorboard, wandb, csv, none"
            )

    @property
    def given(self) -> frozenset[str]:
        """Names of the arguments that were passed, whatever their values."""
        return self._given

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints."""
        return self.save_steps > 0 or self.save_seconds is not None

    def reporters(self) -> list[str]:
        """Return the monitors that `report_to` names."""
        return [name.strip() for name in self.report_to.split(",") if name.strip() not in ("", "none")]

    def warmup(self, max_steps: int) -> int:
        """Return the steps of warm-up in a run of `max_steps`."""
        return int(self.warmup_steps if self.warmup_steps >= 1 else self.warmup_steps * max_steps)

    def auto_values(self, *, world_size: int, max_steps: int, hidden_size: int | None = None) -> AutoValues:
        """Return what the arguments say about the config's "auto"s."""
        shared = {item.name for item in fields(AutoValues)} & {item.name for item in fields(self)}
        values = {name: getattr(self, name) for name in shared}
        values.update(max_steps=max_steps, warmup_steps=self.warmup(max_steps))
        return AutoValues(**values, world_size=world_size, hidden_size=hidden_size, given=self._given & shared)


def _target_modules(names: tuple[str, ...] | None) -> str | list[str] | None:
    """As peft wants them: a list of names, but `all-linear` and a regular expression alone."""
    if names is None:
        return None
    alone = len(names) == 1 and (names[0] == "all-linear" or not re.fullmatch(r"[\w.]+", names[0]))
    return names[0] if alone else list(names)


@dataclass(kw_only=True)
class LoraArguments:
    """Adapters in the place of weights (LoRA, arXiv 2106.09685), by peft; named as in TRL's ModelConfig."""

    _given: ClassVar[frozenset[str]] = frozenset()  # names that were passed; set on each instance

    use_peft: bool = flag(False, "train LoRA adapters with peft; the model's own weights are frozen")
    lora_r: int = flag(16, "rank of the adapters")
    lora_alpha: int = flag(32, "scale the adapters by lora_alpha / lora_r")
    lora_dropout: float = flag(0.0, "dropout on the input of an adapter")
    lora_target_modules: tuple[str, ...] | None = flag(
        None,
        "names of linear layers, a regular expression of full names, or all-linear; default: peft's for the family",
    )
    lora_modules_to_save: tuple[str, ...] | None = flag(None, "names of modules to train fully")
    use_rslora: bool = flag(False, "scale by lora_alpha / sqrt(lora_r) (arXiv 2312.03732)")

    def __new__(cls, **given: Any) -> LoraArguments:
        self = super().__new__(cls)
        # also where the value is the default: without use_peft it is without effect
        object.__setattr__(self, "_given", frozenset(given))
        return self

    def __post_init__(self) -> None:
        given = [item.name for item in fields(self) if item.name in self._given - {"use_peft"}]
        if given and not self.use_peft:
            raise UserError(f"--{given[0]} has no effect without --use_peft")
        if self.lora_r < 1:
            raise UserError(f"--lora_r {self.lora_r}: must be at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"--lora_dropout {self.lora_dropout}: must be at least 0 and below 1")

    def peft_config(self) -> LoraConfig | None:
        """peft's LoraConfig, None without `use_peft`; UserError where peft is not installed."""
        if not self.use_peft:
            return None
        require_peft()
        from peft import LoraConfig

        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=_target_modules(self.lora_target_modules),
            modules_to_save=None if self.lora_modules_to_save is None else list(self.lora_modules_to_save),
            use_rslora=self.use_rslora,
            ensure_weight_tying=self.lora_modules_to_save is not None,
        )


def require_peft() -> None:
    """UserError where peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise UserError("--use_peft: peft is not installed: pip install 'ds-harness[peft]'")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UserErrors: one line, no usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add a flag for each field of a dataclass: its type, default and the `help` of its metadata."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        default = None if item.default is MISSING else item.default
        text = item.metadata["help"].replace("%", "%%")
        suffix = "" if default is None else f" (default: {default})"
        convert = _converter(hints[item.name])
        extra: dict[str, Any] = {"nargs": "?", "const": True} if convert is _boolean else {}
        if "tuple" in str(hints[item.name]):
            extra = {"nargs": "+", "action": _Names}
        parser.add_argument(
            f"--{item.name}",
            type=convert,
            default=argparse.SUPPRESS,
            help=text + suffix,
            metavar=item.name.upper(),
            **extra,
        )


def parse(
    kinds: Sequence[type], argv: Sequence[str] | None, *, prog: str, description: str, epilog: str
) -> tuple[Any, ...]:
    """Parse `argv` into one instance of each dataclass; UserError for what cannot be parsed."""
    parser = Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    for kind in kinds:
        add_flags(parser, kind)
    given = vars(parser.parse_args(argv))
    return tuple(kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given}) for kind in kinds)


class _Names(argparse.Action):
    """Several words, separated by spaces or commas, as a tuple."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        _option_string: str | None = None,
    ) -> None:
        names = tuple(name for value in values for name in value.split(",") if name)
        setattr(namespace, self.dest, names)


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is not true or false")


def _converter(hint: object) -> Callable[[str], object]:
    names = str(hint)
    for kind, convert in (("bool", _boolean), ("float", float), ("int", int)):
        if kind in names or hint is convert:
            return convert
    return str
