"""Write trained adapters as peft stores them: `adapter_config.json` and `adapter_model.safetensors`.

All ranks write into the one file that peft reads, each what it holds. A directory that is shared by all hosts is
assumed, as for checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from harness.checkpoint.atomic import UNFINISHED, replaced_files, sync_file, sync_folder
from harness.checkpoint.tensors.local_shard import local_shard_of
from harness.checkpoint.tensors.whole_tensors import write_tensors
from harness.topology.agreement import all_or_none
from harness.topology.groups import Groups

if TYPE_CHECKING:
    from peft import LoraConfig

STEM = "adapter_model"
FILE = f"{STEM}.safetensors"


def export_adapters(module: nn.Module, groups: Groups, directory: Path, *, rename: Callable[[str], str]) -> None:
    """Write all trained parameters into one file; all ranks call it.

    Args:
        module: this rank's layers.
        rename: the name that is written for a parameter of `module`.
    """
    trained = [each for each in module.named_parameters(remove_duplicate=False) if each[1].requires_grad]
    unfinished = UNFINISHED + STEM
    write_tensors(
        directory, unfinished, [local_shard_of(rename(n), p, groups) for n, p in trained], groups, one_file=True
    )

    def replace() -> None:
        written = directory / f"{unfinished}.safetensors"
        sync_file(written)
        written.replace(directory / FILE)
        sync_folder(directory)

    all_or_none(replace if groups.rank == 0 else lambda: None)


def export_adapter_config(config: LoraConfig, base: str, directory: Path) -> None:
    """Write peft's config, for adapters on the model at `base`; called by one rank."""
    config = copy.copy(config)
    config.base_model_name_or_path = base
    config.inference_mode = True
    with replaced_files(directory) as folder:
        config.save_pretrained(str(folder))
