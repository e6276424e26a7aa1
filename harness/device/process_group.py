"""Initialise the process group, before anything is built."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder

from harness.config import Resolved
from harness.config.values.idle_keys import ON_A_CPU, accelerated
from harness.config.values.json_object import JsonObject
from harness.deepspeed.process_wide import (
    ask_torch_for_free_memory,
    avoid_compiling,
    import_muon_without_compiler,
    mask_norms_on_the_device,
    take_the_only_device,
)
from harness.errors import UserError, refuse_all
from harness.topology.agreement import all_gather_object, host_group, spell_ranks
from harness.topology.env import LaunchEnv, run_timeout
from harness.topology.rendezvous import open_store, require_one_kind
from harness.topology.signed_objects import sign_objects

# DeepSpeed calls such functions, under ZeRO-3 several times per step.
DEPRECATED = r"`torch\.distributed\.\w+` is deprecated"


def start(env: LaunchEnv) -> torch.device:
    """Initialise torch.distributed and deepspeed.comm for this process; return the device of this rank."""
    accelerator = get_accelerator()
    device = torch.device("cpu")
    if accelerator.device_name() != "cpu":
        index = device_index(env.local_rank, accelerator.device_count())
        if accelerator.device_count() == 1:
            take_the_only_device(accelerator)
        accelerator.set_device(index)
        device = torch.device(accelerator.device_name(index))
    if device.type == "cuda":
        ask_torch_for_free_memory(accelerator)
    warnings.filterwarnings("ignore", DEPRECATED, FutureWarning)
    # It is the rank's own.
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
    # Before `init_distributed`, which would compile.
    avoid_compiling()
    mask_norms_on_the_device()
    import_muon_without_compiler()
    timeout = run_timeout()
    # Before any rank sends an object.
    sign_objects()
    if not dist.is_initialized():
        # torch and DeepSpeed read ranks and addresses from the environment.
        env.export(os.environ)
        store = open_store(env, timeout)
        require_one_kind(store, env, device.type)
        dist.init_process_group(
            accelerator.communication_backend_name(),
            store=store,
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
        )
    if device.type == "cuda" and env.world_size > 1:
        # A barrier uses the device of an earlier collective. Without one, torch guesses it from the global rank, which
        # is wrong if hosts have different numbers of GPUs.
        dist.all_reduce(torch.zeros(1, device=device))
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(timeout=timeout, auto_mpi_discovery=False, verbose=False)
    # The first call creates the group, which needs all ranks at once: here they all are.
    host_group()
    return device


def device_index(local_rank: int, visible: int) -> int:
    """Return the index of a rank's device among the visible ones: 0 if CUDA_VISIBLE_DEVICES leaves only one.

    Raises UserError for more local ranks than visible devices.
    """
    if visible == 1:
        return 0
    if local_rank >= visible:
        raise UserError(f"local rank {local_rank} has no device: {visible} are visible; start fewer ranks on this host")
    return local_rank


def shared_store() -> dist.Store:
    """Return the key-value store with which the process group was created."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public name for it


def all_arrive(barrier: str, seconds: float) -> bool:
    """Return whether all ranks reach the same `barrier` within `seconds`: a barrier with a timeout."""
    store = shared_store()
    ranks = range(dist.get_world_size())
    verdict = "all"
    store.set(f"{barrier} {dist.get_rank()}", "")
    try:
        store.wait([f"{barrier} {rank}" for rank in ranks], timedelta(seconds=seconds))
    except dist.DistStoreError:
        verdict = "not all"
    # Compare-and-set: the first rank that sees all others, or gives up, decides for all. A rank that arrives just as
    # another gives up must come to the same result.
    return bool(store.compare_set(f"{barrier} verdict", "", verdict) == b"all")


def open_groups() -> frozenset[dist.ProcessGroup]:
    return frozenset(dist.distributed_c10d._world.pg_map)  # noqa: SLF001  # torch has no public list of them


def give_timeout(groups: Iterable[dist.ProcessGroup]) -> None:
    """Set the run's timeout on groups created by DeepSpeed, whose default on a GPU is 10 minutes."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(run_timeout(), group)  # noqa: SLF001  # torch has no public name for it


def close_groups(kept: frozenset[dist.ProcessGroup]) -> None:
    """Destroy all process groups except `kept`: each gloo group has polling threads."""
    for group in open_groups() - kept:
        # Not torch's function: DeepSpeed caches some groups for its next engine, and must forget them.
        deepspeed.comm.destroy_process_group(group)


def mixed_devices(device: torch.device) -> str | None:
    """Return a warning if ranks have different kinds of devices, else None; all ranks call it."""
    name = None if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))
    ranks: dict[str | None, list[int]] = {}
    for rank, found in enumerate(all_gather_object(name)):
        ranks.setdefault(found, []).append(rank)
    if len(ranks) < 2:
        return None
    held = ", ".join(f"{spell_ranks(those)} {found}" for found, those in ranks.items())
    return f"ranks have different devices ({held}): each step takes as long as on the slowest of them"


def require_precision(precision: str) -> None:
    """Raise UserError if this device cannot train in `precision` (fp32, bf16 or fp16)."""
    accelerator = get_accelerator()
    supported = {"bf16": accelerator.is_bf16_supported, "fp16": accelerator.is_fp16_supported}
    if precision in supported and not supported[precision]():
        others = [name for name, is_supported in supported.items() if is_supported()]
        raise UserError(
            f"{precision} is not supported on this {accelerator.device_name()}: use {' or '.join([*others, 'fp32'])}"
        )


def require_supported(resolved: Resolved) -> None:
    """Raise UserError if this machine's devices cannot run a config. Needs no process group."""
    require_precision(resolved.precision)
    require_device(resolved.config, torch.device(get_accelerator().device_name()))


def require_device(config: JsonObject, device: torch.device) -> None:
    """Raise UserError for features that this device cannot run: accelerator kernels on a CPU, NVMe without libaio."""
    if device.type == "cpu":
        refuse_all([f"DS109 {message}; {ON_A_CPU}" for message in accelerated(config).values()])
    zero = config.get("zero_optimization", {})
    nvme = zero.get("stage") == 3 and (zero.get("offload_optimizer") or {}).get("device") == "nvme"
    if nvme and not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError("zero_optimization.offload_optimizer.device nvme: needs libaio (Debian: libaio-dev)")
