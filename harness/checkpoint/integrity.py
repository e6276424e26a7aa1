"""Is a checkpoint still what was saved? Its manifest lists its files, with their sizes and checksums.

Sizes are looked at before anything is built, checksums by all ranks together, each its share, before one is loaded: a
rank that found a damaged file alone, while it loads, would leave the others waiting. Importing this needs no torch.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from harness.checkpoint.directories import METRICS, NAME, OLD_STATE, STATE, numbered, read_progress
from harness.checkpoint.manifest import MANIFEST, checksum, read_manifest
from harness.errors import UserError


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, as far as names and sizes show it; None if nothing is."""
    if (checkpoint / OLD_STATE).is_file():
        return "an earlier version of ds-harness wrote it, which saved for one layout: resume with that version"
    if not checkpoint.is_dir():
        return "no such directory"
    if not (checkpoint / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_manifest(checkpoint)
        wrong = next(
            filter(None, (_wrong_size(checkpoint, name, file[0]) for name, file in manifest.files.items())), None
        )
        steps = {MANIFEST: manifest.step, STATE: manifest.step if wrong else read_progress(checkpoint).step}
    except UserError as error:
        return str(error)
    name = NAME.fullmatch(checkpoint.name)
    if name:
        wrong = wrong or next(
            (f"{file} is of step {step}" for file, step in steps.items() if step != int(name[1])), None
        )
    return wrong


def changed_file(checkpoint: Path, share: int, shares: int) -> str | None:
    """Return the first file of this rank's share whose content is not what was saved, in words; None if there is
    none."""
    for name, (_, saved) in sorted(read_manifest(checkpoint).files.items())[share::shares]:
        try:
            if checksum(checkpoint / name) != saved:
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


def _wrong_size(checkpoint: Path, name: str, saved: int) -> str | None:
    try:
        size = (checkpoint / name).stat().st_size
    except OSError:
        return f"{name} is missing"
    return None if size == saved else f"{name} has {size:,} bytes of {saved:,}"
