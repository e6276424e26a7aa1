"""The flags of training: samples and steps, optimizer, model and precision, layout."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from harness.arguments.themes.flags import Flags, flag
from harness.config.values.arguments import BETAS, BLOCK_SIZE, FP8, SCHEDULES, AutoValues, schedule_fault, warmup_of
from harness.errors import UserError
from harness.optimizers import DEFAULT, FLAGS

ROUTER_BATCH = 8
"""Samples of an evaluation micro-batch for a model with a router loss; transformers' default for every model.

A router loss is not a mean over samples: it depends on the size of a micro-batch, which must not follow the layout.
"""


@dataclass(kw_only=True)
class BatchArguments(Flags):
    """The length of samples, the batch sizes and the number of steps."""

    TITLE: ClassVar[str] = "Samples, batches and steps"

    block_size: int | None = flag(
        None,
        f"tokens per sample of text or conversations (default: the model's length, at most {BLOCK_SIZE})",
        hf_only=True,
        of_scripts=True,
    )
    packing: bool = flag(False, "pack whole documents into blocks; attention stays within each document", hf_only=True)
    max_steps: int = flag(-1, "optimizer steps; -1: as many as num_train_epochs needs", least=-1)
    num_train_epochs: float = flag(3.0, "passes through the data, unless max_steps is given", least=0)
    per_device_train_batch_size: int = flag(AutoValues.per_device_train_batch_size, "samples per micro-batch", least=1)
    per_device_eval_batch_size: int | None = flag(
        None,
        f"samples per evaluation micro-batch (default: as in training; with a router loss {ROUTER_BATCH})",
        least=1,
    )
    gradient_accumulation_steps: int = flag(
        AutoValues.gradient_accumulation_steps, "micro-batches per step on each data-parallel rank", least=1
    )
    global_batch_size: int | None = flag(
        None, "samples per step over all ranks, in every layout; sets the accumulation", least=1
    )
    shuffle_buffer_size: int = flag(
        0, "number of samples of a stream to read at once and shuffle; 0: keep the order of the stream", least=0
    )
    dataloader_num_workers: int = flag(
        0, "processes on each rank that read the next steps' samples ahead; 0: the rank reads them itself", least=0
    )

    def check(self) -> None:
        """Refuse a run without steps."""
        if self.max_steps == 0:
            raise UserError("--max_steps 0: must be at least 1, or -1 to train for --num_train_epochs")


@dataclass(kw_only=True)
class OptimizerArguments(Flags):
    """Optimizer and learning rate, if the DeepSpeed JSON says "auto" or nothing."""

    TITLE: ClassVar[str] = "Optimizer and schedule"

    learning_rate: float = flag(AutoValues.learning_rate, "peak learning rate", least=0)
    lr_scheduler_type: str = flag(AutoValues.lr_scheduler_type, ", ".join(SCHEDULES), choices=SCHEDULES)
    lr_scheduler_kwargs: Mapping[str, object] | str | None = flag(
        None, 'further values of the schedule, as JSON: {"min_lr": 1e-6}'
    )
    warmup_steps: float = flag(
        AutoValues.warmup_steps, "steps of linear warm-up; below 1: the fraction of all steps", least=0
    )
    warmup_ratio: float | None = flag(None, "warm-up as a fraction of all steps; same as warmup_steps below 1", least=0)
    optim: str = flag(AutoValues.optim, f"{', '.join(FLAGS)}; others as optimizer.type in the DeepSpeed JSON")
    weight_decay: float = flag(
        AutoValues.weight_decay, f"{DEFAULT.name}'s weight decay; not applied to biases and norms", least=0
    )
    adam_beta1: float = flag(AutoValues.adam_beta1, f"{DEFAULT.name}'s beta1", least=0)
    adam_beta2: float = flag(AutoValues.adam_beta2, f"{DEFAULT.name}'s beta2", least=0)
    adam_epsilon: float = flag(AutoValues.adam_epsilon, f"{DEFAULT.name}'s epsilon", least=0)
    max_grad_norm: float = flag(AutoValues.max_grad_norm, "clip gradients to this norm; 0: no clipping", least=0)

    def warmup(self, max_steps: int) -> int:
        """Return the number of warm-up steps in a run of `max_steps`."""
        ratio = self.warmup_ratio
        return warmup_of(self.warmup_steps, max_steps) if ratio is None else math.ceil(ratio * max_steps)

    def check(self) -> None:
        """Refuse two warm-up lengths, a beta of 1 or more, and optimizers that only the DeepSpeed JSON can name."""
        self._check_schedule()
        if self.warmup_ratio is not None and self.warmup_steps:
            raise UserError("--warmup_ratio and --warmup_steps are both given: give one of them")
        if self.warmup_ratio is not None and self.warmup_ratio > 1:
            raise UserError(f"--warmup_ratio {self.warmup_ratio}: must be at most 1")
        # At 1 the bias correction divides by 1 - beta**step = 0.
        for name in BETAS:
            if getattr(self, name) >= 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be below 1")
        if self.optim not in FLAGS:
            known = ", ".join(FLAGS)
            raise UserError(f"--optim {self.optim}: give {known}, or name another as optimizer.type in the JSON")

    def _check_schedule(self) -> None:
        options = self.lr_scheduler_kwargs or {}
        # Not a JSON object: `typed` takes it for a path.
        if isinstance(options, str):
            raise UserError(f"--lr_scheduler_kwargs {options}: give a JSON object, as '{{\"min_lr\": 1e-6}}'")
        if fault := schedule_fault(self.lr_scheduler_type, options):
            raise UserError(f"--lr_scheduler_kwargs: {fault}")
        # transformers divides min_lr by the learning rate.
        if "min_lr" in options and not self.learning_rate:
            raise UserError("--lr_scheduler_kwargs: min_lr needs a --learning_rate above 0")


SDPA_BACKENDS = ("auto", "cudnn", "flash", "fa3", "fa4", "efficient", "math")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(kw_only=True)
class ModelArguments(Flags):
    """Precision, attention and additions to the loss."""

    TITLE: ClassVar[str] = "Model and precision"

    bf16: bool = flag(AutoValues.bf16, "train in bfloat16; auto: where the GPU has it")
    fp16: bool = flag(AutoValues.fp16, "train in float16 with loss scaling")
    use_cpu: bool = flag(False, "train on the CPU, although there is a GPU", aliases=["no_cuda"])
    tf32: bool | None = flag(
        None, "on a GPU, multiply float32 matrices in TF32: several times as fast, 10 bits of mantissa; default: off"
    )
    fp8: str = flag(
        AutoValues.fp8,
        "fp8 products in decoder layers of a bf16 run: rowwise (NVIDIA, compute capability 8.9), or emulate anywhere",
        choices=FP8,
        hf_only=True,
    )
    attn_implementation: str | None = flag(
        None,
        "eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention; default: the model's, else sdpa or eager",
        choices=ATTENTION,
        hf_only=True,
    )
    sdpa_backend: str = flag(
        "auto",
        "kernel that sdpa attention tries first on a GPU: cudnn, flash, fa3 or fa4 (with their packages), efficient or "
        "math; auto: cudnn on Hopper and later (on Hopper it takes half the time of flash), else torch's order",
        choices=SDPA_BACKENDS,
        hf_only=True,
    )
    use_liger_kernel: bool | str = flag(
        False,
        "use the kernels of liger-kernel (to be installed) for norms, feed-forward blocks and rotary embeddings; auto: "
        "only where it is installed and the harness has none",
        choices=("auto",),
        hf_only=True,
    )
    fused_kernels: bool = flag(
        True,
        "compute norms, rotary embeddings and gated activations in fewer passes over memory: in any precision on a "
        "GPU, in fp32 on a CPU",
        hf_only=True,
    )
    gradient_checkpointing: bool = flag(
        False,
        "recompute the activations of decoder layers in the backward pass; if given, overrides "
        "pipeline.activation_checkpoint_interval",
        aliases=["activation_checkpointing"],
    )
    neftune_noise_alpha: float | None = flag(
        None,
        "noise on the token embeddings in training, up to alpha / sqrt(tokens x width) (arXiv 2310.05914)",
        least=0,
        hf_only=True,
    )
    label_smoothing_factor: float = flag(
        0.0,
        "share of each target that is spread evenly over the vocabulary, from 0 to below 1; each rank then holds the "
        "logits of the whole vocabulary",
        least=0,
        hf_only=True,
    )
    output_router_logits: bool | None = flag(
        None, "add the model's router loss (mixture of experts) to the loss; default: as its config says", hf_only=True
    )
    router_aux_loss_coef: float | None = flag(
        None, "factor of the router loss (default: the model's own)", hf_only=True
    )

    def check(self) -> None:
        """Refuse a label smoothing of 1 or more."""
        if self.label_smoothing_factor >= 1:
            raise UserError(f"--label_smoothing_factor {self.label_smoothing_factor}: must be below 1")


@dataclass(kw_only=True)
class LayoutArguments(Flags):
    """How ranks share the model. These flags override the DeepSpeed JSON."""

    TITLE: ClassVar[str] = "Layout"

    pipeline_parallel_size: int | None = flag(None, "pipeline stages; overrides pipeline.stages", least=1)
    tensor_parallel_size: int | None = flag(
        None, "tensor-parallel ranks; overrides tensor_parallel.autotp_size", least=1
    )
    expert_parallel_size: int | None = flag(
        None,
        "ranks of a stage among which experts are divided; overrides expert_parallel.autoep_size",
        least=1,
        hf_only=True,
    )
    context_parallel_size: int | None = flag(
        None,
        "data-parallel ranks among which each sequence is split; overrides context_parallel.size",
        least=1,
        hf_only=True,
    )
    rebalance_steps: int | None = flag(
        None,
        "steps between comparisons of the pipeline's stages; layers move if that saves more than 5% of a step",
        least=1,
    )
