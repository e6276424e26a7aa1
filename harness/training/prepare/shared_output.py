"""Whether all ranks write to the same folder, found out before anything is trained."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from harness.errors import UserError
from harness.resilience.process.records import THIS_RANK
from harness.topology.agreement import all_or_none, spell_ranks, values_of_all

PATIENCE_S = 3.0  # network file systems may show a new file late


def require_shared(output_dir: Path, rank: int, world_size: int) -> None:
    """Raise UserError on all ranks if one does not see what rank 0 writes to `output_dir`; all ranks call it."""
    if world_size == 1:
        return

    def mark() -> Path | None:
        if rank > 0:
            return None
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output_dir, prefix="shared-", delete=False) as file:
            return Path(file.name)

    marker = values_of_all(all_or_none(mark))[0]
    assert marker is not None
    seen = values_of_all((THIS_RANK.host, _appears(output_dir / marker.name)))
    if rank == 0:
        marker.unlink()
    blind = [number for number, (_, sees) in enumerate(seen) if not sees]
    if blind:
        raise UserError(
            f"--output_dir {output_dir}: {spell_ranks(blind)} (host {seen[blind[0]][0]}) cannot see what rank 0 (host "
            f"{seen[0][0]}) writes there: give a folder on a file system that all hosts share"
        )


def _appears(path: Path) -> bool:
    """Whether a file is there, now or soon."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return path.exists()
