"""What compressed gradients have lost to rounding so far: a file of each rank in a checkpoint.

It belongs to a rank and its layers, so only a run in the same layout goes on from it, then with the same numbers to the
bit. Any other begins without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from harness.errors import UserError
from harness.parallel.gradients.compressed import CompressedReduction
from harness.topology.agreement import all_or_none, values_of_all


def residue_file(checkpoint: Path) -> Path:
    """Return where this rank's residue lies in a checkpoint."""
    return checkpoint / f"gradient_residue-{dist.get_rank():05d}.safetensors"


def write_residue(folder: Path, tensors: dict[str, Tensor], description: str) -> None:
    """Write a copy of a reduction's state; UserError if that fails, as on a full disk."""
    path = residue_file(folder)
    try:
        save_file(tensors, path, metadata={"describes": description})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from error


def load_residue(reduction: CompressedReduction | None, checkpoint: Path, layout: str, listed: Container[str]) -> bool:
    """Go on with the residues in a checkpoint, or without any where they are of another layout; all ranks call it.

    `listed`: the files of the checkpoint; any other is not read. Return whether all residues that it has are used.
    """

    def read() -> dict[str, Tensor] | None:
        path = residue_file(checkpoint)
        return None if reduction is None or path.name not in listed else _read(path, describe(reduction, layout))

    found = all_or_none(read)
    whole = all(values_of_all(reduction is None or found is not None))
    if reduction is not None and whole and found is not None:
        reduction.set_state(found)
    elif reduction is not None:
        reduction.reset()
    return whole


def describe(reduction: CompressedReduction, layout: str) -> str:
    """Return a text that is the same for reductions that can go on from each other's residue."""
    parts = list(reduction.sizes), list(reduction.kinds), [bucket.size for bucket in reduction.buckets]
    placed = hashlib.sha256(str(parts).encode()).hexdigest()
    return f"{layout}, rank {dist.get_rank()}, {reduction.bits} bits, {placed}"


def _read(path: Path, description: str) -> dict[str, Tensor] | None:
    """Return the tensors of a file, None if it does not fit; UserError if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("describes") != description:
                return None
            found: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return found
