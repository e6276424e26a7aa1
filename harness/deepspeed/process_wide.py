"""Process-wide changes to what DeepSpeed prints, compiles and keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import deepspeed
import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.runtime import compiler
from deepspeed.runtime.pipe import module, topology
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.utils import groups
from torch import Tensor
from torch.distributed import ProcessGroup

P = ParamSpec("P")
R = TypeVar("R")


def silence_prints() -> None:
    """Silence the prints of DeepSpeed's pipeline; log messages and warnings stay."""
    # A module's own names are found before the builtins.
    for place in (module, topology):
        vars(place)["print"] = lambda *_words: None


def avoid_compiling() -> None:
    """Keep DeepSpeed from compiling a shared-memory all-reduce (about 25 s) that only its inference engine uses."""
    # The entry also keeps DeepSpeed from filling its table of compatible ops, for which each rank would start compilers
    # for about a second. A run needs no other entry.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def import_muon_without_compiler() -> None:
    """Import DeepSpeed's `original_muon`, as every ZeRO engine does, but without torch's compiler until it is used."""
    # A decorator in that module imports the compiler at once, which takes more than a second of each start.
    compile_at_once = compiler.compile
    compiler.compile = lambda: _compiled_when_called
    try:
        from deepspeed.runtime.zero.muon import original_muon  # noqa: F401
    finally:
        compiler.compile = compile_at_once


def _compiled_when_called(function: Callable[P, R]) -> Callable[P, R]:
    @functools.cache
    def compiled() -> Callable[P, R]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        return compiled()(*args, **named)

    return call


def mask_norms_on_the_device() -> None:
    """Make ZeRO-1 and ZeRO-2 replace a non-finite norm by -1 without a copy from the host."""
    # DeepSpeed creates a tensor of -1 on the host in each step, and copying it to the device makes the host wait.
    stage_1_and_2.mask_nan_or_inf_with_val_inplace = _mask


def _mask(norm: Tensor, device: torch.device | None = None, val: float = -1.0) -> None:  # noqa: ARG001
    norm.masked_fill_(~norm.isfinite(), val)


def ask_torch_for_free_memory(accelerator: DeepSpeedAccelerator) -> None:
    """Make DeepSpeed ask torch for a GPU's free memory in bytes."""
    # If NVML's package is installed, DeepSpeed asks NVML with the number in CUDA_VISIBLE_DEVICES, which may be a UUID
    # instead, with which ZeRO-1 and ZeRO-2 would fail.
    accelerator.available_memory = lambda index=None: torch.cuda.mem_get_info(index)[0]


def take_the_only_device(accelerator: DeepSpeedAccelerator) -> None:
    """Make DeepSpeed use device 0 in a process that sees only one device."""
    # Replaced already by an earlier run of this process.
    if "device_name" in vars(accelerator):
        return
    named = accelerator.device_name
    chosen = accelerator.set_device
    # DeepSpeed uses the local rank as device index, when it builds a module or an engine and under ZeRO-3 in each step.
    # But a launcher may show each rank only its own device, like Slurm with --gpus-per-task.
    accelerator.device_name = lambda index=None: named(None if index is None else 0)
    accelerator.set_device = lambda _index: chosen(0)


def set_secondary_group(group: ProcessGroup | None) -> None:
    """Set the group whose ranks share a secondary copy of ZeRO-3's parameters (hpZ); None without a copy."""
    # DeepSpeed reads it from its own module in many places. It would create one only once per process, from consecutive
    # global ranks, which are not data-parallel peers in every layout.
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group


class MpuAdapter:
    """A tensor-parallel group with the methods that DeepSpeed's activation checkpointing calls on Megatron's `mpu`."""

    def __init__(self, rank: int, size: int, group: ProcessGroup | None) -> None:
        self.get_tensor_model_parallel_rank = lambda: rank
        self.get_tensor_model_parallel_world_size = lambda: size
        self.get_tensor_model_parallel_group = lambda: group
