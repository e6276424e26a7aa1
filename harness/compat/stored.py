"""Compare the tensors of two HuggingFace directories, to the last bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def stored_difference(wanted: Path, found: Path) -> str | None:
    """Return the first difference between the safetensors of `found` and of `wanted`; None if they are equal."""
    a, b = _tensors(wanted), _tensors(found)
    if missing := sorted(set(a) - set(b)):
        return f"{missing[0]} is missing ({len(missing)} in all)"
    if extra := sorted(set(b) - set(a)):
        return f"{extra[0]} is unexpected ({len(extra)} in all)"
    for name, tensor in a.items():
        if tensor.shape != b[name].shape or tensor.dtype != b[name].dtype:
            return f"{name} is {b[name].dtype} {tuple(b[name].shape)} instead of {tensor.dtype} {tuple(tensor.shape)}"
        if not torch.equal(tensor, b[name]):
            return f"{name} has other values"
    return None


def _tensors(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
