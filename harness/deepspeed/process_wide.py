"""What DeepSpeed keeps, compiles and prints for a whole process, whatever engine it runs."""

from __future__ import annotations

import deepspeed
import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.runtime.pipe import module, topology
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.utils import groups
from torch import Tensor
from torch.distributed import ProcessGroup


def silence_prints() -> None:
    """Have DeepSpeed's pipeline print nothing; what it logs and warns of stays."""
    for place in (module, topology):
        vars(place)["print"] = _print_nothing


def _print_nothing(*_words: object) -> None:
    """Take the place of `print`."""


def avoid_compiling() -> None:
    """Keep DeepSpeed from compiling a shared-memory all-reduce (about 25 s) that only its inference engine uses.

    Nor does it find out which of its other ops could be compiled, for which each rank would start compilers for a
    second: this is the only entry of the table that a run asks for.
    """
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def mask_norms_on_the_device() -> None:
    """Have ZeRO-1 and ZeRO-2 mark a norm that is not finite without a number that is copied from the host each time."""
    stage_1_and_2.mask_nan_or_inf_with_val_inplace = _mask


def _mask(norm: Tensor, device: torch.device | None = None, val: float = -1.0) -> None:  # noqa: ARG001
    norm.masked_fill_(~norm.isfinite(), val)


def ask_torch_for_free_memory(accelerator: DeepSpeedAccelerator) -> None:
    """Have torch say how much of a GPU is free.

    DeepSpeed asks NVML, where its package is installed, by the number in CUDA_VISIBLE_DEVICES; that may hold UUIDs, on
    which ZeRO-1 and ZeRO-2 would fail.
    """
    accelerator.available_memory = lambda index=None: torch.cuda.mem_get_info(index)[0]


def set_secondary_group(group: ProcessGroup | None) -> None:
    """Set the group whose ranks share a second copy of ZeRO-3's parameters (hpZ); None where there is none.

    DeepSpeed reads it from its own module in many places. It makes one by itself only once a process, of neighbours
    in the world.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group


class MpuAdapter:
    """A tensor-parallel group by the names under which DeepSpeed's activation checkpointing asks for it."""

    def __init__(self, rank: int, size: int, group: ProcessGroup | None) -> None:
        self.get_tensor_model_parallel_rank = lambda: rank
        self.get_tensor_model_parallel_world_size = lambda: size
        self.get_tensor_model_parallel_group = lambda: group
