"""Which model adapters stand on: checksums of its weights, so that a run does not resume them on another one.

A path says nothing about a model, which may have been moved or replaced, and the config of a fine-tuned one is that of
its origin. Small tensors are read whole, of large ones a few blocks: the weights of a large model would take minutes.
Values are compared in float32, so that the same model in memory, in a wider dtype, counts as the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.hf.skeleton import ModelSource
from harness.hf.weights.lazy_tensor import LazyTensor
from harness.hf.weights.stored_tensor import Stored
from harness.hf.weights.tensor_files import open_tensors

WHOLE = 1 << 18  # elements up to which a tensor is read whole
BLOCKS, BLOCK = 8, 1 << 12  # blocks that are read of a larger one, and the elements of each


def base_checksums(source: ModelSource, trained: Sequence[str] = ()) -> dict[str, str]:
    """Return CRC-32 in hex, by name, of the weights that adapters stand on; none for a base that is made from the seed.

    Args:
        trained: names of modules that are trained whole beside the adapters: their weights are left out.

    Raises:
        UserError: a file of weights cannot be read.
    """
    tensors: Mapping[str, Tensor]
    if isinstance(source.weights, Path):
        tensors = open_tensors(source.weights).tensors
    else:
        tensors = {name: each for name, each in (source.weights or {}).items() if isinstance(each, nn.Parameter)}
    base = {name: tensor for name, tensor in tensors.items() if not any(f".{part}." in f".{name}." for part in trained)}
    return {name: f"{_checksum(tensor):08x}" for name, tensor in sorted(base.items()) if source.has_values}


def _checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor of any shape, or of blocks of it."""
    total, count = 0, tensor.numel()
    last = max(count - BLOCK, 0)
    spans = [(0, count)] if count <= WHOLE else [(at := last * n // (BLOCKS - 1), at + BLOCK) for n in range(BLOCKS)]
    for start, stop in spans:
        values = _elements(tensor, start, stop).to("cpu", torch.float32).contiguous()
        total = zlib.crc32(values.numpy().data, total)
    return total


def _elements(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return elements of a tensor, in their order, as a tensor of one dimension."""
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
