"""The arguments of a run that a config may leave values to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AutoValues:
    """Arguments by their HuggingFace names and defaults; `given` holds the names that the user set."""

    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    max_steps: int = 1
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    global_batch_size: int | None = None
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    bf16: bool = False
    fp16: bool = False
    hidden_size: int | None = None
    pipeline_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    expert_parallel_size: int | None = None
    world_size: int = 1
    given: frozenset[str] = field(default_factory=frozenset)

    def source(self, name: str) -> str:
        """Where an argument's value comes from, in words."""
        return f"--{name}" if name in self.given else f"default of --{name}"
