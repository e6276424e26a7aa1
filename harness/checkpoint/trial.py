"""Test before the first step whether checkpoints can be written, by the same calls that write them.

A run that fails at its first save wastes its training. All ranks write side by side into the same pages of one file, to
detect also a file system on which hosts overwrite each other's bytes.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from harness.atomic import exchange, sync_file, sync_folder
from harness.checkpoint.directories import partial_name, remove
from harness.checkpoint.tensors.tensor_writer import Entry, FileRegion, OpenFiles, create, file_regions
from harness.errors import UserError
from harness.topology.agreement import all_or_none, broadcast_object, spell_ranks

VALUES = 1000  # float32 values of each rank: 4,000 bytes, so that neighbours share pages of 4,096


def try_saving(output_dir: Path, *, several_hosts: bool) -> None:
    """Write a small file where checkpoints will be, read it back, and delete it; all ranks call it.

    Raises UserError on all ranks if that fails. Leaves nothing behind in either case.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
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
