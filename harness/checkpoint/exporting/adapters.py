"""Write trained adapters as peft stores them: `adapter_config.json` and `adapter_model.safetensors`.

Each pipeline stage writes its own tensors, gathered one by one; rank 0 joins them in the one file that peft reads. A
directory that is shared by all hosts is assumed, as for checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harness.checkpoint.atomic import replaced_files
from harness.checkpoint.exporting.gather import trained_tensors
from harness.topology.groups import Groups

if TYPE_CHECKING:
    from peft import LoraConfig

FILE = "adapter_model.safetensors"


def export_adapters(module: nn.Module, groups: Groups, directory: Path, *, rename: Callable[[str], str]) -> None:
    """Write all trained parameters into one file; all ranks call it.

    Args:
        module: this rank's layers.
        rename: the name that is written for a parameter of `module`.
    """
    place = groups.coordinate
    writes = place.dp_rank == 0 and place.tp_rank == 0
    tensors = {rename(name): tensor for name, tensor in trained_tensors(module, groups) if tensor is not None}
    if writes:
        save_file(tensors, _part(directory, place.stage))
    dist.barrier()
    if groups.rank == 0:
        joined: dict[str, Tensor] = {}
        for stage in range(groups.layout.pp_size):
            joined.update(load_file(_part(directory, stage)))
            _part(directory, stage).unlink()
        with replaced_files(directory) as folder:
            save_file(joined, folder / FILE, metadata={"format": "pt"})
    dist.barrier()


def export_adapter_config(config: LoraConfig, base: str, directory: Path) -> None:
    """Write peft's config, for adapters on the model at `base`; called by one rank."""
    config = copy.copy(config)
    config.base_model_name_or_path = base
    config.inference_mode = True
    with replaced_files(directory) as folder:
        config.save_pretrained(str(folder))


def _part(directory: Path, stage: int) -> Path:
    return directory / f"writing-adapters-{stage:05d}.safetensors"
