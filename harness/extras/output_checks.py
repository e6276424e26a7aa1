"""Check before the first step that checkpoints can be written to the output directory.

A run that fails at its first save wastes its training. So it tries the calls that write checkpoints. All ranks write
side by side into the same pages of one file, to detect also a file system on which hosts overwrite each other's bytes.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from harness.atomic import exchange, open_no_link, sync_file, sync_folder
from harness.checkpoint.directories import partial_name, remove
from harness.checkpoint.run_lock import LOCK
from harness.checkpoint.tensors.tensor_writer import Entry, FileRegion, OpenFiles, create, file_regions
from harness.console import Console
from harness.errors import UserError
from harness.resilience.process.records import THIS_RANK
from harness.topology.agreement import (
    HostValues,
    all_gather_object,
    all_or_none,
    any_rank,
    broadcast_object,
    spell_ranks,
)

PATIENCE_S = 3.0  # network file systems may show a new file with a delay
VALUES = 1000  # float32 values of each rank: 4,000 bytes, so that neighbours share pages of 4,096


def require_shared(output_dir: Path, rank: int, world_size: int) -> None:
    """Raise UserError on all ranks if one cannot see a file that rank 0 writes to `output_dir`; all ranks call it."""
    if world_size == 1:
        return

    def mark() -> Path | None:
        if rank > 0:
            return None
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output_dir, prefix="shared-", delete=False) as file:
            return Path(file.name)

    marker = broadcast_object(all_or_none(mark))
    assert marker is not None
    appears = _appears(output_dir / marker.name)
    # Also a barrier: all ranks have looked before rank 0 removes the file.
    is_blind = any_rank(not appears)
    if rank == 0:
        marker.unlink()
    if is_blind:
        seen = all_gather_object((THIS_RANK.host, appears))
        blind = [number for number, (_, sees) in enumerate(seen) if not sees]
        raise UserError(
            f"--output_dir {output_dir}: {spell_ranks(blind)} (host {seen[blind[0]][0]}) cannot see what rank 0 (host "
            f"{seen[0][0]}) writes there: give a folder on a file system that all hosts share"
        )


def _appears(path: Path) -> bool:
    """Return whether a file exists, now or within PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < until:
        with suppress(OSError):
            sync_folder(path.parent)  # makes an NFS client ask the server again
        time.sleep(0.1)
    return path.exists()


def require_writable(output_dir: Path, here: HostValues[int], rank: int, console: Console) -> None:
    """Write a small file where checkpoints will be; warn if another host could take the lock that rank 0 holds.

    All ranks call it, once rank 0 holds the lock; `here` has the ranks of this host. Raises UserError on all ranks if
    no checkpoint can be written.
    """
    try_saving(output_dir, several_hosts=here.hosts > 1)
    looks = min(here.values) == rank and here.number > 0  # one rank of each other host
    if here.hosts > 1 and any_rank(looks and is_lent_twice(output_dir)):
        console.warn(
            f"{output_dir}: file locks are not shared between hosts: a second run on another host is not refused; "
            "this run notices it at its next save"
        )


def try_saving(output_dir: Path, *, several_hosts: bool) -> None:
    """Write a small file where checkpoints will be, read it back, and delete it; all ranks call it.

    Raises UserError on all ranks if that fails. Leaves nothing behind in either case.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    folder = output_dir / partial_name(0)
    path = folder / "trial.safetensors"
    header, (region,) = file_regions(path, [Entry(name="w", shape=(ranks, VALUES), dtype=torch.float32, trained=True)])
    try:
        # Each all_or_none is a barrier too: no rank writes before the file exists, none reads before all have written.
        all_or_none(lambda: _create(path, header, region) if rank == 0 else None)
        all_or_none(lambda: _write(region, rank, several_hosts=several_hosts))
        lost = broadcast_object(all_or_none(lambda: _lost(region, ranks) if rank == 0 else []))
        if lost:
            raise UserError(
                f"the values of {spell_ranks(lost)} are missing from the file: the file system loses concurrent writes "
                "of several ranks to one file: use another one"
            )
        all_or_none(lambda: _rename(folder) if rank == 0 else None)
    except UserError as error:
        raise UserError(f"--output_dir {output_dir}: checkpoints cannot be written there: {error}") from error
    finally:
        if rank == 0:
            remove([folder, _other(folder)])


def _create(path: Path, header: bytes, region: FileRegion) -> None:
    remove([path.parent, _other(path.parent)])  # left by a run killed during this test
    path.parent.mkdir(parents=True)
    create(path, header, [region])


def _write(region: FileRegion, rank: int, *, several_hosts: bool) -> None:
    with OpenFiles(several_hosts=several_hosts) as opened:
        opened.write(region, (rank, 0), torch.full((1, VALUES), rank + 1.0))
        opened.sync()


def _lost(region: FileRegion, ranks: int) -> list[int]:
    """Return the ranks whose values are missing from the file."""
    content = bytearray(region.path.read_bytes()[region.start :])
    if len(content) != region.entry.nbytes:
        return list(range(ranks))
    rows = torch.frombuffer(content, dtype=torch.float32).view(ranks, VALUES)
    return [rank for rank, row in enumerate(rows) if not bool((row == rank + 1).all())]


def _rename(folder: Path) -> None:
    """Rename a folder like `directories.finish`, and exchange it with another if the file system can."""
    sync_file(folder / "trial.safetensors")
    sync_folder(folder)
    other = folder.rename(_other(folder))
    folder.mkdir()
    exchange(folder, other)
    sync_folder(folder.parent)


def _other(folder: Path) -> Path:
    return folder.with_name("writing-removed-0")


def is_lent_twice(directory: Path) -> bool:
    """Return whether this process can take a lock that another host holds, so that locks do not work across hosts."""
    try:
        descriptor = open_no_link(directory / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
