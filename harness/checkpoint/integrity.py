"""Is a checkpoint still what was saved? Its trainer_state.json lists its files, with their sizes and checksums.

Sizes are looked at before anything is built, checksums by all ranks together, each its share, before one is loaded: a
rank that found a damaged file alone, while it loads, would leave the others waiting. Importing this needs no torch.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from pathlib import Path

from harness.checkpoint.directories import METRICS, NAME, STATE, numbered, read_progress
from harness.errors import UserError

CHUNK = 16 << 20

Files = dict[str, list[int]]
"""Size in bytes and CRC-32 of each file, by its path in the checkpoint."""


def contents(folder: Path, share: int = 0, shares: int = 1) -> Files:
    """Return what lies in a checkpoint that was just written, or every `shares`-th file of it from number `share`
    on."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != STATE)
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)] for path in files[share::shares]
    }


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, as far as names and sizes tell; None if nothing is."""
    if not (checkpoint / STATE).is_file():
        return f"{STATE} is missing"
    try:
        progress = read_progress(checkpoint)
    except UserError as error:
        return str(error)
    name = NAME.fullmatch(checkpoint.name)
    if name and int(name.group(1)) != progress.step:
        return f"{STATE} is of step {progress.step}"
    return next(filter(None, (_wrong_size(checkpoint, *item) for item in progress.files.items())), None)


def changed_file(checkpoint: Path, share: int, shares: int) -> str | None:
    """Return the first file of this rank's share whose content is not what was saved, in words; None if there is
    none."""
    files: Mapping[str, list[int]] = read_progress(checkpoint).files
    for name, (_, checksum) in sorted(files.items())[share::shares]:
        try:
            if _checksum(checkpoint / name) != checksum:
                return f"{name} differs from what was saved"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def find_resume(output_dir: Path, wanted: str | None) -> Path | None:
    """Return the checkpoint that `--resume_from_checkpoint` means, None for a fresh start.

    Raises UserError if a named checkpoint is not whole, or if this run would overwrite another one: by a fresh start,
    or by going on from a checkpoint of a run elsewhere.
    """
    if wanted == "auto":
        return newest_whole(output_dir)
    if wanted is not None:
        if reason := damage(Path(wanted)):
            raise UserError(f"--resume_from_checkpoint {wanted}: no whole checkpoint there ({reason})")
        if Path(wanted).resolve().parent == output_dir.resolve():
            return Path(wanted)
    if (output_dir / METRICS).exists() or numbered(output_dir):
        raise UserError(
            f"--output_dir {output_dir} already holds a run: give another directory, "
            "or --resume_from_checkpoint auto to continue it"
        )
    return None if wanted is None else Path(wanted)


def newest(output_dir: Path, count: int | None) -> list[Path] | None:
    """Return the newest `count` whole checkpoints, which are kept; None keeps all."""
    whole = (path for _, path in reversed(numbered(output_dir)) if damage(path) is None)
    return None if count is None else list(itertools.islice(whole, count))


def newest_whole(output_dir: Path, before: Path | None = None) -> Path | None:
    """Return the newest checkpoint of a run, or the newest older than `before`, of which nothing is missing."""
    step = None if before is None else {path: step for step, path in numbered(output_dir)}[before]
    older = (path for number, path in reversed(numbered(output_dir)) if step is None or number < step)
    return next((path for path in older if damage(path) is None), None)


def damaged(output_dir: Path, chosen: Path | None) -> list[str]:
    """One line for each checkpoint that is newer than the chosen one, and what is wrong with it."""
    newer = []
    for _, path in reversed(numbered(output_dir)):
        if path == chosen:
            break
        newer.append(f"{path} is damaged ({reason})" if (reason := damage(path)) else "")
    return [line for line in newer if line]


def _wrong_size(checkpoint: Path, name: str, saved: list[int]) -> str | None:
    try:
        size = (checkpoint / name).stat().st_size
    except OSError:
        return f"{name} is missing"
    return None if size == saved[0] else f"{name} has {size:,} bytes of {saved[0]:,}"


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            total = zlib.crc32(chunk, total)
    return total
