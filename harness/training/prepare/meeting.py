"""The ranks of a run meet: they compare config, code, model and data, and open the run's process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.checkpoint.run_lock import lock_directory
from harness.device.process_group import mixed_devices, open_groups, require_supported, start
from harness.errors import UserError
from harness.resilience.process.records import THIS_RANK
from harness.topology.agreement import HostValues, all_gather_on_host, all_or_none, check_agreement, gather_object
from harness.topology.groups import Groups, build_groups
from harness.topology.hosts import Hosts, host_id
from harness.training.prepare.plan import RunSpec


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a rank knows once all ranks have met.

    Attributes:
        groups: this rank's device and process groups.
        foreign_groups: process groups that were open before the run; they outlive it.
        on_host: the ranks of this host.
    """

    groups: Groups
    foreign_groups: frozenset[dist.ProcessGroup]
    on_host: HostValues[int]


def meet(spec: RunSpec) -> Meeting:
    """Meet the other ranks; all ranks call it.

    Raises:
        UserError: on all ranks, if their config, code, model or data differ, a device cannot run the config, or the
            output directory cannot be used.
    """
    args, console, env, parts = spec.args, spec.console, spec.inputs.env, spec.parts
    # The watchdog needs the process groups, and these need all ranks: until then only stopped processes are looked for.
    THIS_RANK.doing = "waiting for the other ranks"
    with parts.watch.for_stopped_ranks(args.hang_seconds, console):
        device = start(env)
        if args.use_cpu and device.type != "cpu":
            raise UserError("--use_cpu: DeepSpeed has found a GPU already: set DS_ACCELERATOR=cpu in the environment")
        # On every rank, as hosts may have different devices.
        all_or_none(lambda: require_supported(spec.resolved))
        if parts.output_checks is not None:
            parts.output_checks.require_shared(spec.output_dir, env.rank, env.world_size)
        check_agreement(spec.resolved.config, spec.layout, others=all_or_none(spec.fingerprint))
        all_or_none(lambda: lock_directory(spec.output_dir) if env.rank == 0 else None)
        foreign_groups = open_groups()
        # Only after all ranks have agreed on the layout: they must create the same groups in the same order.
        groups = build_groups(spec.layout, spec.resolved.chunks.loss_stage, device)
        THIS_RANK.rank = groups.rank
        THIS_RANK.stage = groups.coordinate.stage
        parts.watch.ranks(args, groups, console, on_accelerator=device.type != "cpu")
    if device.type == "cpu" and parts.host_collectives is not None:
        parts.host_collectives(groups)
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    elif device.type == "cuda" and spec.resolved.precision == "fp32":
        console.say("TF32 is off, as in torch: float32 products are exact; --tf32 makes them several times as fast")
    if text := mixed_devices(device):
        console.warn(text)
    on_host, hosts = all_gather_on_host(host_id(), groups.rank), Hosts(tuple(gather_object(host_id())))
    if spec.samples is not None and parts.output_checks is not None:
        parts.output_checks.require_writable(spec.output_dir, on_host, groups.rank, console)
    # On rank 0, which alone has gathered the hosts.
    if hosts.ids and parts.placement_advice is not None and (advice := parts.placement_advice(spec.layout, hosts)):
        console.warn(advice)
    return Meeting(groups=groups, foreign_groups=foreign_groups, on_host=on_host)
