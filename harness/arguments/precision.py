"""The value `auto` of --bf16, as in axolotl's configs: bfloat16 if the GPU supports it, else float32."""

from __future__ import annotations

AUTO = "auto"
BF16 = "bf16"


def is_auto(name: str, value: object) -> bool:
    """Return whether a flag is --bf16 with the value `auto`."""
    return name == BF16 and str(value).lower() == AUTO


def computes_in_bf16() -> bool:
    """Return whether this machine has a GPU with bfloat16. Imports torch."""
    import torch

    # By default torch also counts GPUs before Ampere, which only emulate bfloat16.
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
