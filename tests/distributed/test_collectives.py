"""Collectives through memory that the ranks of one host share, against torch.distributed's.

Three ranks and two are launched once each: a sum of two is made at once, a sum of more in shares.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.comm import comm
from torch import Tensor

from harness import Trainer
from harness.deepspeed.collectives import carry_collectives
from harness.deepspeed.process_wide import avoid_compiling
from harness.extras import host_collectives, peers
from harness.extras.host_memory import HostMemory
from harness.parallel import collectives
from harness.parallel.tensor.layers import overlap_sums
from tests.support.ranks import run_ranks
from tests.support.training import STEPS, Curve, Job, arguments_of, logged, rows, without_shared_memory

pytestmark = [pytest.mark.ranks, pytest.mark.on_host("ranks share the memory of the host, not of a device")]
CASES = [(size, dtype) for size in (1, 60_000) for dtype in (torch.float64, torch.bfloat16, torch.int64)]
CASES += [(7, torch.float32), ((1 << 20) + 5, torch.float32)]  # summed at once, in shares, and in several pieces
TOLERANCE = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.int64: 0.0}  # order of the sums


def numbers(size: int, dtype: torch.dtype, rank: int) -> Tensor:
    made = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (made * 8).to(dtype)


def results(x: Tensor, group: dist.ProcessGroup) -> dict[str, Tensor]:
    ranks = dist.get_world_size(group)
    in_place = x.clone()
    collectives.all_reduce_in_place(in_place, group)
    return {
        "sum": collectives.all_reduce(x, group),
        "sum of a transposed tensor": collectives.all_reduce(x.view(1, -1).expand(2, -1).t(), group),
        "sum in place": in_place,
        "largest": collectives.all_reduce_max(x, group),
        "joined": torch.cat(collectives.all_gather(x, group)),
        "share of a sum": collectives.start_reduce_scatter(x.repeat(2 * ranks).view(2 * ranks, -1), group)(),
        "sums at once": torch.cat(sums_at_once(x, group)),
        "exchanged": exchanged(x, group),
    }


def exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks for all ranks, of other lengths each, none from the first to the last."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [[(source + 2 * target) % 3 + 1 + len(x) // 7 for target in range(ranks)] for source in range(ranks)]
    sizes[0][-1] = 0
    rows = x.repeat(9)[: sum(sizes[rank])]
    pairs = collectives.start_all_to_all(torch.stack([rows, rows + 1], dim=1), sizes, group)()
    none = collectives.start_all_to_all(x[:0], [[0] * ranks] * ranks, group)()
    assert not len(none) and len(pairs) == sum(row[rank] for row in sizes)
    return pairs


def sums_at_once(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Results of collectives that begin before others have ended, and are asked for in another order, and twice."""
    begun = [collectives.start_all_reduce(x * number, group) for number in (1, 2)]
    begun.append(collectives.start_reduce_scatter(x.repeat(dist.get_world_size(group)), group))
    largest = collectives.all_reduce_max(x, group)
    return [largest, begun[2](), begun[0](), begun[1](), begun[0]()]


def is_kept(group: dist.ProcessGroup) -> bool:
    """Whether a result outlives its last name, until Python's collector finds it."""
    gc.disable()
    try:
        collectives.all_reduce(torch.ones(4), group)
        results = [
            collectives.start_all_reduce(torch.ones(4), group)(),
            collectives.start_reduce_scatter(torch.ones(12), group)(),
        ]
        alive = [weakref.ref(result) for result in results]
        results.clear()
        return any(ref() is not None for ref in alive)
    finally:
        gc.enable()


def means_are_right(group: dist.ProcessGroup) -> bool:
    """Whether each rank gets its part of the mean of tensors of several sizes, some of which give a rank nothing."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    tensors = [numbers(size, torch.float32, rank).view(1, -1) for size in (1, 7, 60_000, 2, (1 << 20) + 5)]
    found, again = (host_collectives.means_in_memory(tensors, group) for _ in range(2))
    assert found is not None and again is not None
    for mean, same, tensor in zip(found, again, tensors, strict=True):
        dist.all_reduce(tensor.div_(ranks), group=group)
        size = -(-tensor.numel() // ranks)
        wanted = tensor.view(-1)[rank * size : (rank + 1) * size]
        assert torch.equal(mean, same)
        torch.testing.assert_close(mean, wanted, rtol=1e-5, atol=1e-6)
    return True


def compare() -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    inputs = {case: numbers(*case, dist.get_rank()) for case in CASES}
    wanted = {case: results(x, group) for case, x in inputs.items()}
    collectives.share_memory([group, None], HostMemory.open)
    shares = collectives.shares_memory(group)
    with (
        patch.object(dist, "all_reduce", None),
        patch.object(dist, "all_gather_single", None),
        patch.object(dist, "all_to_all_single", None),
    ):
        first = {case: results(x, group) for case, x in inputs.items()}
        again = {case: results(x, group) for case, x in inputs.items()}
    totals = {case: found["sum"] for case, found in first.items()}
    kept = is_kept(group)
    means = means_are_right(group)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, totals)
    collectives.leave_memory()
    return {
        "shares": shares,
        "kept": kept,
        "means": means,
        "left": collectives.shares_memory(group),
        "errors": {
            (*case, name): ((found - wanted[case][name]).abs().max() / wanted[case][name].abs().max()).item()
            for case, every in first.items()
            for name, found in every.items()
        },
        "equal again": all(torch.equal(again[case][name], first[case][name]) for case in first for name in first[case]),
        "equal on all ranks": all(torch.equal(each[case], totals[case]) for each in everywhere for case in totals),
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_shared_memory_gives_what_torch_distributed_gives(ranks: int) -> None:
    for found in run_ranks(ranks, compare):
        assert found["shares"] and not found["left"] and not found["kept"]
        assert found["equal again"] and found["means"]
        assert found["equal on all ranks"]
        wrong = {case: error for case, error in found["errors"].items() if not error <= TOLERANCE[case[1]]}
        assert not wrong


def opened(seconds: float) -> HostMemory:
    group = dist.group.WORLD
    assert group is not None
    memory = HostMemory.open(group, timedelta(seconds=seconds))
    assert memory is not None
    return memory


def words_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail() -> list[str]:
    """What a rank says where the others are in another collective, late, and gone; what they forked lives on."""
    rank = dist.get_rank()
    unequal, late, gone = opened(60), opened(1), opened(60)
    said = [words_of(lambda: unequal.all_reduce(torch.ones(2 + rank)))]
    said.append(words_of(lambda: late.all_reduce(torch.ones(2))) if rank == 0 else "")
    child = os.fork() if rank else 0
    if rank and not child:
        time.sleep(600)
    dist.barrier()
    if rank:
        gone.close()
    said.append(words_of(lambda: gone.all_reduce(torch.ones(2))) if rank == 0 else "")
    if rank:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return said


def test_a_rank_that_is_elsewhere_late_or_gone_is_named() -> None:
    assert run_ranks(2, fail)[0] == [
        "RuntimeError: ranks are in different collectives: 8 bytes here, 12 on rank 1",
        "TimeoutError: timed out: rank 1 of the group did not join the collective",
        "ConnectionError: connection closed by peer: rank 1 of the group has ended",
    ]


def handed_over(stranger: socket.socket) -> list[int]:
    """The files that a stranger has got."""
    try:
        return socket.recv_fds(stranger, 1, 1)[1]
    except ConnectionResetError:  # what it said was never read
        return []


def with_strangers() -> tuple[list[list[int]], bool, float]:
    """The files that strangers get who call the first rank before the others do, and whether the ranks meet still."""
    group, strangers = dist.group.WORLD, []
    assert group is not None
    listen = peers._listen

    def called_by_strangers() -> Any:
        found = listen()
        assert found is not None
        greeting = peers._GREETING.pack(1, bytes(16))
        told = [(0, greeting), (0, b"garbage"), (0, b"")]
        if os.geteuid() == 0:  # else there is no other user to be
            told.append((65534, peers._GREETING.pack(1, found[1].secret)))
        for user, words in told:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            os.seteuid(user or os.geteuid())
            stranger.connect(found[1].name)
            os.seteuid(os.getuid())
            stranger.send(words)
            strangers.append(stranger)
        strangers[2].close()
        return found

    with patch.object(peers, "_listen", called_by_strangers) if dist.get_rank() == 0 else nullcontext():
        collectives.share_memory([group], HostMemory.open)
    return (
        [handed_over(stranger) for stranger in strangers if stranger.fileno() >= 0],
        collectives.shares_memory(group),
        collectives.all_reduce(torch.ones(1), group).item(),
    )


def test_a_stranger_who_calls_while_ranks_meet_gets_nothing_and_stops_nobody() -> None:
    first, second = run_ranks(2, with_strangers)
    assert first == ([[]] * (3 if os.geteuid() == 0 else 2), True, 2.0)
    assert second == ([], True, 2.0)


def full(*_: object) -> None:
    raise OSError("no space left")


def without() -> list[tuple[bool, float]]:
    """Whether memory is shared, and a sum, where one rank has another system, no memory, or another host."""
    group, found = dist.group.WORLD, []
    assert group is not None
    here = peers.Path
    elsewhere: list[Any] = [
        patch.object(sys, "platform", "other"),
        patch.object(os, "posix_fallocate", full),
        patch.object(peers, "Path", lambda name: here("/proc/self/ns/mnt" if name.endswith("net") else name)),
    ]
    for other in elsewhere:
        with patch.object(peers, "_MEETING_S", 2.0), other if dist.get_rank() else nullcontext():
            collectives.share_memory([group], HostMemory.open)
        found.append((collectives.shares_memory(group), collectives.all_reduce(torch.ones(1), group).item()))
    return found


def test_ranks_that_cannot_share_memory_use_torch_distributed() -> None:
    assert run_ranks(2, without) == [[(False, 2.0)] * 3] * 2


def scattered(dtype: torch.dtype) -> list[bool]:
    """Whether a rank gets its share of a sum, at once and when it waits, without gloo's own reduce-scatter."""
    avoid_compiling()
    deepspeed.init_distributed("gloo")
    carry_collectives(
        lambda _x, _group: False, lambda _whole, _x, _group: False, lambda _part, _x, _group: False, lambda *_: None
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given = torch.arange(8 * ranks, dtype=dtype).view(4 * ranks, 2) + rank
    wanted = (given - rank)[4 * rank : 4 * (rank + 1)] * ranks + sum(range(ranks))
    now, later = torch.empty(4, 2, dtype=dtype), torch.empty(4, 2, dtype=dtype)
    with patch.object(comm.cdb, "reduce_scatter_function", None):
        comm.cdb.reduce_scatter_tensor(now, given)
        under_way = comm.cdb.reduce_scatter_tensor(later, given, async_op=True)
        began = under_way.is_completed()
        under_way.wait()
    return [torch.equal(now, wanted), torch.equal(later, wanted), not began and under_way.is_completed()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_reduce_scatter_between_hosts_sends_shares_alone(ranks: int) -> None:
    assert run_ranks(ranks, scattered, torch.bfloat16) == [[True] * 3] * ranks


def run_to_its_end(layout: str, folder: Path, *, overlap: bool = False) -> tuple[Curve, dict[str, Any]]:
    arguments = arguments_of(Job("tiny-llama", layout), str(folder), logging_steps=1)
    trainer = Trainer("tiny-llama", arguments, train_dataset=rows())
    if overlap:
        overlap_sums(trainer.run.module)
    trainer.train()
    trainer.close()
    return [(row["loss"], row["grad_norm"]) for row in logged(folder)], json.loads((folder / "run.json").read_text())


def with_and_without(layouts: list[str], folder: Path) -> list[tuple[int, bool, list[str], list[str]]]:
    """Steps of a run that shares memory, whether they have the numbers of one that does not, and what both say."""
    found = []
    for layout in layouts:
        with without_shared_memory():
            wanted, without = run_to_its_end(layout, folder / f"{layout}-without")
            overlaps = layout.startswith("tp2")
            overlapped = run_to_its_end(layout, folder / "overlapped", overlap=True)[0] if overlaps else wanted
        curve, shared = run_to_its_end(layout, folder / layout)
        found.append((len(curve), curve == wanted == overlapped, without["shared_memory"], shared["shared_memory"]))
    return found


@pytest.mark.parametrize(
    "layouts",
    [["dp2z3"], pytest.param(["tp2z0", "dp2z1", "dp2z2"], marks=pytest.mark.thorough)],
    ids=["first", "others"],
)
def test_a_run_has_the_same_numbers_to_the_bit(layouts: list[str], tmp_path: Path) -> None:
    """Without shared memory, with it, and with sums that weight gradients hide."""
    axes = ["tensor" if layout.startswith("tp") else "data" for layout in layouts]
    found = run_ranks(2, with_and_without, layouts, tmp_path, timeout_s=300)[0]
    assert found == [(STEPS, True, [], [axis]) for axis in axes]
