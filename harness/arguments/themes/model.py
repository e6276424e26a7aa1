"""The flags of how the model computes."""

from dataclasses import dataclass
from typing import ClassVar

from harness.arguments.flags import Flags, flag
from harness.errors import UserError

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")


@dataclass(kw_only=True)
class ModelArguments(Flags):
    """Precision, attention and what is added to the loss."""

    TITLE: ClassVar[str] = "Model and precision"

    bf16: bool = flag(False, "train in bfloat16")
    fp16: bool = flag(False, "train in float16 with loss scaling")
    attn_implementation: str | None = flag(
        None,
        "eager, sdpa, flash_attention_2 or flash_attention_3; default: the config.json's, else sdpa or eager",
        choices=ATTENTION,
        hf_only=True,
    )
    use_liger_kernel: bool = flag(
        False,
        "norms, feed-forward blocks and rotary embedding by the kernels of liger-kernel, where it is installed",
        hf_only=True,
    )
    gradient_checkpointing: bool | None = flag(
        None,
        "compute the activations of decoder layers again in the backward pass; default: as "
        "pipeline.activation_checkpoint_interval says, which it overrides",
    )
    neftune_noise_alpha: float | None = flag(
        None,
        "noise on the token embeddings in training, up to alpha / sqrt(tokens x width) (arXiv 2310.05914)",
        least=0,
        hf_only=True,
    )
    label_smoothing_factor: float = flag(
        0.0,
        "share of the loss that is spread evenly over the vocabulary, from 0 to below 1; each rank then holds the "
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
        """Refuse to spread all of the loss, or more."""
        if self.label_smoothing_factor >= 1:
            raise UserError(f"--label_smoothing_factor {self.label_smoothing_factor}: must be below 1")
