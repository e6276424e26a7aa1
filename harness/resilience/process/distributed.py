"""Start the process group, once, before anything is built."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder

from harness.config import ConfigError, Resolved
from harness.config.check import unsupported_on_cpu
from harness.config.values.json_object import JsonObject
from harness.deepspeed.orthogonal import import_muon_without_compiler
from harness.deepspeed.process_groups import avoid_compiling
from harness.errors import UserError
from harness.topology.env import LaunchEnv, run_timeout
from harness.topology.rendezvous import open_store

DEPRECATED = r"`torch\.distributed\.\w+` is deprecated"  # DeepSpeed calls them, several times a step under ZeRO-3


def start(env: LaunchEnv) -> torch.device:
    """Initialise torch.distributed for this process, alone or launched; returns this rank's device."""
    accelerator = get_accelerator()
    device = torch.device("cpu")
    if accelerator.device_name() != "cpu":
        index = device_index(env.local_rank, accelerator.device_count())
        accelerator.set_device(index)
        device = torch.device(accelerator.device_name(index))
    warnings.filterwarnings("ignore", DEPRECATED, FutureWarning)
    avoid_compiling()
    import_muon_without_compiler()
    timeout = run_timeout()
    if not dist.is_initialized():
        env.export(os.environ)
        dist.init_process_group(
            accelerator.communication_backend_name(),
            store=open_store(env, timeout),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
        )
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(timeout=timeout, auto_mpi_discovery=False, verbose=False)
    return device


def device_index(local_rank: int, visible: int) -> int:
    """Return the number of a rank's device among the `visible` ones; where it sees one alone (CUDA_VISIBLE_DEVICES),
    that one.

    Raises UserError if there is none left for it.
    """
    if visible == 1:
        return 0
    if local_rank >= visible:
        raise UserError(f"local rank {local_rank} has no device: {visible} are visible; start fewer ranks on this host")
    return local_rank


def shared_store() -> dist.Store:
    """Return the key-value store in which all ranks have met."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public name for it


def all_arrive(place: str, seconds: float) -> bool:
    """Whether all ranks call this for the same place within some seconds."""
    store, ranks = shared_store(), range(dist.get_world_size())
    store.set(f"{place} {dist.get_rank()}", "")
    try:
        store.wait([f"{place} {rank}" for rank in ranks], timedelta(seconds=seconds))
    except dist.DistStoreError:
        return False
    return True


def open_groups() -> frozenset[dist.ProcessGroup]:
    """All process groups that this process has."""
    return frozenset(dist.distributed_c10d._world.pg_map)  # noqa: SLF001  # torch has no public list of them


def give_timeout(groups: Iterable[dist.ProcessGroup]) -> None:
    """Give groups that DeepSpeed has made the run's timeout; on a GPU they would have 10 minutes."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(run_timeout(), group)  # noqa: SLF001  # torch has no public name for it


def close_groups(kept: frozenset[dist.ProcessGroup]) -> None:
    """Destroy all process groups but `kept`: with gloo each has threads that never sleep for long."""
    for group in open_groups() - kept:
        deepspeed.comm.destroy_process_group(group)  # DeepSpeed's, as it keeps some for its next engine


def largest(values: Sequence[int], device: torch.device) -> list[int]:
    """Each value's largest on any rank; all ranks call it with as many."""
    if dist.get_world_size() == 1:
        return list(values)
    found = torch.tensor(values, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [int(value) for value in found.tolist()]


def any_rank(requested: bool, device: torch.device) -> bool:
    """Whether `requested` is true on any rank; all ranks call it."""
    return bool(largest([int(requested)], device)[0])


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
    """Raise UserError for a config that this machine's devices cannot run; no process group is needed."""
    require_precision(resolved.precision)
    require_device(resolved.config, torch.device(get_accelerator().device_name()))


def require_device(config: JsonObject, device: torch.device) -> None:
    """Raise UserError for what this device cannot run: kernels for accelerators on a CPU, NVMe without libaio."""
    unsupported = unsupported_on_cpu(config) if device.type == "cpu" else []
    if unsupported:
        raise ConfigError(unsupported)
    zero = config.get("zero_optimization", {})
    nvme = zero.get("stage") == 3 and (zero.get("offload_optimizer") or {}).get("device") == "nvme"
    if nvme and not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError("zero_optimization.offload_optimizer.device nvme: needs libaio (Debian: libaio-dev)")
