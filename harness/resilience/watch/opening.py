"""Begin to watch a run: find out which ranks share a host, and give these a page of memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch.distributed as dist

from harness.arguments import TrainingArguments
from harness.console import Console
from harness.resilience.process.distributed import shared_store
from harness.resilience.process.records import HERE
from harness.resilience.watch.activity import ACTIVITY
from harness.resilience.watch.board import Board
from harness.resilience.watch.hosts import OtherHosts
from harness.resilience.watch.watcher import Limits, Member, Watcher
from harness.topology.agreement import values_of_all
from harness.topology.env import run_timeout
from harness.topology.groups import Groups
from harness.topology.hosts import host_id
from harness.topology.processes import status_of

NAMESPACES = ("pid", "net", "mnt")  # ranks in other ones cannot see each other's processes, or not reach them alike
SHARE_OF_TIMEOUT = 0.8


def watch_run(args: TrainingArguments, groups: Groups, console: Console) -> Watcher | None:
    """Watch the ranks of a run until the watcher is closed; all ranks call it.

    Returns None on a system that shows no processes. An earlier run of this process is not watched any longer.
    """
    ACTIVITY.stop_watching()
    status = status_of(os.getpid())
    everyone = values_of_all(None if status is None else _myself(groups, status.started))
    if None in everyone:
        return None
    members = [member for member in everyone if member is not None]
    hosts = list(dict.fromkeys(member.host_id for member in members))
    mine = members[groups.rank].host_id
    local = [member for member in members if member.host_id == mine]
    board, name = _shared_board(local, groups.rank)
    others = OtherHosts(shared_store(), hosts.index(mine), len(hosts), name) if len(hosts) > 1 else None
    watcher = Watcher(
        board,
        local,
        [member.rank for member in local].index(groups.rank),
        Limits(hang=args.hang_seconds, longest=SHARE_OF_TIMEOUT * run_timeout().total_seconds()),
        console,
        Path(args.output_dir).absolute(),
        others,
    )
    watcher.start()
    dist.barrier()  # every row says something before anybody judges by it
    return watcher


def _myself(groups: Groups, started: int) -> Member:
    ids = [host_id(), *(str(Path(f"/proc/self/ns/{name}").readlink()) for name in NAMESPACES)]
    return Member(
        rank=groups.rank,
        stage=groups.coordinate.stage,
        host=HERE.host,
        host_id=" ".join(ids),
        pid=os.getpid(),
        started=started,
    )


def _shared_board(local: list[Member], rank: int) -> tuple[Board, str]:
    """Return the board of this host's ranks, and a name that all ranks of the run, and no other run, have."""
    first = local[0].rank == rank
    folder = Path(tempfile.mkdtemp(prefix="ds-harness-watch-")) if first else None
    folders = values_of_all(folder)
    shared = folders[local[0].rank]
    assert shared is not None and folders[0] is not None
    board = Board(shared / "board", len(local))
    dist.barrier()
    if folder is not None:
        (folder / "board").unlink()
        folder.rmdir()
    return board, folders[0].name
