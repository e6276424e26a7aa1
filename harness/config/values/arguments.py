"""The arguments of a run that replace "auto" in a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, isfinite

# Tokens per sample, or the model's positions if it has fewer, as run_clm.py's default for --block_size.
BLOCK_SIZE = 1024

# transformers' schedules that depend on the step alone, and the options that each takes in --lr_scheduler_kwargs.
OF_COSINE = ("num_cycles", "min_lr", "min_lr_rate")
SCHEDULE_OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": OF_COSINE,
    "cosine_warmup_with_min_lr": (*OF_COSINE, "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type"),
        *("min_lr_ratio", "num_cycles"),
    ),
}
SCHEDULES = tuple(SCHEDULE_OPTIONS)
FP8 = ("no", "rowwise", "emulate")  # how decoder layers multiply in 8 bits
FP8_MULTIPLE = 16  # widths in fp8 matrix products must be multiples of this
CURVES = ("linear", "cosine", "1-sqrt")  # values of warmup_type and decay_type

BETAS = ("adam_beta1", "adam_beta2")  # below 1
LEAST = {  # the smallest allowed value of an argument; for sizes it is 1
    **dict.fromkeys(("learning_rate", "warmup_steps", "weight_decay", *BETAS, "adam_epsilon", "max_grad_norm"), 0),
    **dict.fromkeys(("max_steps", "gradient_accumulation_steps"), 1),
}


def schedule_fault(kind: str, options: Mapping[str, object]) -> str | None:
    """Return why transformers' schedule `kind` does not accept these options; None if it does."""
    takes = SCHEDULE_OPTIONS.get(kind)
    if takes is None:
        return None  # refused as a value of --lr_scheduler_type
    for name, value in options.items():
        if name not in takes:
            return f"{kind} takes no {name}" + (f", only {', '.join(takes)}" if takes else "")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if name in ("warmup_type", "decay_type") and value not in CURVES:
            return f"{name} is {value!r}: give {', '.join(CURVES)}"
        if name not in ("warmup_type", "decay_type") and not is_number:
            return f"{name} is {value!r}: give a number"
    if "min_lr" in takes and ("min_lr" in options) == ("min_lr_rate" in options):
        return f"{kind} needs min_lr or min_lr_rate, and not both"
    if "num_decay_steps" in takes and "num_decay_steps" not in options:
        return f"{kind} needs num_decay_steps"
    return None


def warmup_of(steps: float, max_steps: int) -> int:
    """Return the warm-up steps; `steps` below 1 is a fraction of `max_steps`, rounded up as in HuggingFace."""
    return int(steps) if steps >= 1 else ceil(steps * max_steps)


@dataclass(frozen=True, kw_only=True)
class AutoValues:
    """Arguments with HuggingFace's names and defaults; `given` holds the names that the user set."""

    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, object] | str | None = None
    warmup_steps: float = 0
    max_steps: int = 1
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optim: str = "adamw_torch_fused"
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool | None = None
    global_batch_size: int | None = None
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    bf16: bool = False
    fp16: bool = False
    fp8: str = "no"
    hidden_size: int | None = None
    pipeline_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    expert_parallel_size: int | None = None
    context_parallel_size: int | None = None
    world_size: int = 1
    given: frozenset[str] = field(default_factory=frozenset)

    @property
    def layout(self) -> dict[str, int | None]:
        """The number of ranks, and the layout sizes that override the config's, as arguments of `ConfigView`."""
        return {
            "world_size": self.world_size,
            "pp_override": self.pipeline_parallel_size,
            "tp_override": self.tensor_parallel_size,
            "ep_override": self.expert_parallel_size,
            "cp_override": self.context_parallel_size,
        }

    def source(self, name: str) -> str:
        """Return the source of an argument's value as text."""
        return f"--{name}" if name in self.given else f"default of --{name}"

    @property
    def by_pointer(self) -> tuple[tuple[str, str, object], ...]:
        """The values that replace "auto" in the file: pointer, name of the argument, value."""
        # One key for two flags: the one that was given is named as its source.
        betas = next((name for name in ("adam_beta1", "adam_beta2") if name in self.given), "adam_beta1")
        # DeepSpeed's schedules want at least 1.
        warmup = max(1, warmup_of(self.warmup_steps, self.max_steps))
        return (
            ("/gradient_clipping", "max_grad_norm", self.max_grad_norm),
            ("/optimizer/params/lr", "learning_rate", self.learning_rate),
            ("/optimizer/params/betas", betas, [self.adam_beta1, self.adam_beta2]),
            ("/optimizer/params/eps", "adam_epsilon", self.adam_epsilon),
            ("/optimizer/params/weight_decay", "weight_decay", self.weight_decay),
            ("/scheduler/params/warmup_max_lr", "learning_rate", self.learning_rate),
            ("/scheduler/params/warmup_num_steps", "warmup_steps", warmup),
            ("/scheduler/params/total_num_steps", "max_steps", self.max_steps),
        )
