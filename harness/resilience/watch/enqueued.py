"""Count the communication that each rank has enqueued on its accelerator: collectives of each group, sends, receives.

On an accelerator such a call returns before it is done. A rank therefore waits in a later call than the one that hangs,
often at the end of the step, and its stack does not help. But a rank that skipped a call has made one less than the
others. A group's backend counts its collectives; sends and receives are counted here.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from harness.resilience.process.activity import BEATS_OF_STEP
from harness.resilience.watch.diagnosis import RankStatus
from harness.topology.agreement import spell_ranks

P = ParamSpec("P")
R = TypeVar("R")
SENT: Counter[int] = Counter()
RECEIVED: Counter[int] = Counter()
"""Tensors of this process, by the other rank."""


@dataclass(frozen=True)
class Enqueued:
    """What a rank has enqueued since the process group was made."""

    calls: dict[str, int] = field(default_factory=dict)  # number of collectives, by the name of the group
    members: dict[str, list[int]] = field(default_factory=dict)  # the ranks of each group
    sent: dict[int, int] = field(default_factory=dict)  # number of tensors, by the other rank
    received: dict[int, int] = field(default_factory=dict)


def count_transfers() -> None:
    """Count what this process sends and receives from now on, all of it through torch's `isend` and `irecv`."""
    module = dist.distributed_c10d
    for name, key, counter in (("isend", "dst", SENT), ("irecv", "src", RECEIVED)):
        begin = getattr(module, name)
        if not hasattr(begin, "is_counted"):
            counted = _counted(begin, key, counter)
            setattr(module, name, counted)  # one function by both names: torch compares them
            setattr(dist, name, counted)


def _counted(begin: Callable[P, R], key: str, counter: Counter[int]) -> Callable[P, R]:
    of_call = inspect.signature(begin)

    @wraps(begin)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        given = of_call.bind(*args, **kwargs).arguments
        other = given.get(key)
        in_group = given.get(f"group_{key}")
        if other is None and in_group is not None:
            group = given.get("group") or dist.group.WORLD
            assert group is not None
            other = dist.get_global_rank(group, in_group)
        if other is not None:
            counter[other] += 1
        return begin(*args, **kwargs)

    run.is_counted = True  # type: ignore[attr-defined]
    return run


def enqueued() -> Enqueued:
    """Return what this rank has enqueued; call it from another thread than the one that enqueues."""
    world = dist.distributed_c10d._world  # noqa: SLF001  # torch has no public list of its groups
    found = Enqueued(sent=dict(SENT), received=dict(RECEIVED))
    for group, ranks in list(world.pg_group_ranks.items()):
        with suppress(RuntimeError, KeyError):  # a backend that does not count
            # torch's stubs lack it
            name = world.pg_names[group]
            counted = "_get_sequence_number_for_group"
            found.calls[name] = int(getattr(group, counted)())
            found.members[name] = sorted(ranks)
    return found


def left_out(found: Mapping[int, Enqueued], statuses: Sequence[RankStatus]) -> tuple[int, str] | None:
    """Return the rank that skipped a call, and which call; None if all ranks have made the same.

    If several ranks have made fewer calls than others, choose one that is at least as far in the step as those others.
    One that is not may only be waiting, for the call that another rank skipped.
    """
    places = {each.rank: each for each in statuses}

    def is_on_its_way(case: tuple[int, list[int], str]) -> bool:
        one = places[case[0]]
        for other in (places[rank] for rank in case[1] if rank in places):
            unit = 1 if one.stage == other.stage else BEATS_OF_STEP  # stages do different things within a step
            if one.beats // unit < other.beats // unit:
                return True
        return False

    cases = sorted((case for case in _behind(found) if case[0] in places), key=is_on_its_way)
    return (cases[0][0], cases[0][2]) if cases else None


def _behind(found: Mapping[int, Enqueued]) -> Iterator[tuple[int, list[int], str]]:
    """Yield each rank with fewer calls, the others that have made more, and what it lacks."""
    for rank, own in found.items():
        for other, sent in own.sent.items():
            arrived = found[other].received.get(rank, 0) if other in found else sent
            if sent > arrived:
                yield other, [rank], f"receives {arrived} of the {sent} tensors that rank {rank} has sent to it"
        for other, arrived in own.received.items():
            sent = found[other].sent.get(rank, 0) if other in found else arrived
            if sent < arrived:
                yield other, [rank], f"has sent {sent} of the {arrived} tensors that rank {rank} receives from it"
    groups = {name: ranks for own in found.values() for name, ranks in own.members.items()}
    for name, members in groups.items():
        calls = {rank: found[rank].calls[name] for rank in members if rank in found and name in found[rank].calls}
        most = max(calls.values(), default=0)
        ahead = [rank for rank, count in calls.items() if count == most]
        for rank, count in calls.items():
            if count < most:
                group = f"the group of {spell_ranks(members)}"
                yield rank, ahead, f"has begun {count} collectives of {group}, {spell_ranks(ahead)} {most}"


def flight_record() -> bytes | None:
    """Return NCCL's own record of its latest calls, as torch's `fr_trace` reads it; None if there is none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)  # noqa: SLF001  # its documented name
    with suppress(RuntimeError):
        return dump(includeCollectives=True, includeStackTraces=True, onlyActive=False) if dump is not None else None
    return None


def abort_groups() -> None:
    """Abort what hangs on the accelerator, if the backend can (NCCL): its kernels end, and the device is free."""
    with suppress(Exception):  # this process ends in any case
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001  # torch has no public name for it
