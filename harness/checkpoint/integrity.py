"""Is a checkpoint still what was saved? Its manifest lists its files, with their sizes and checksums.

Sizes are compared before anything is built. Checksums are compared by all ranks together, each its share of the files,
before anything is loaded: a rank that found a damaged file alone would leave the others waiting. Importing this needs
no torch.
"""

from __future__ import annotations

import itertools
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from harness.checkpoint.atomic import sync_folder
from harness.checkpoint.directories import (
    MANIFEST,
    METRICS,
    NAME,
    OLD_STATE,
    RUN,
    STATE,
    checksum,
    numbered,
    read_manifest,
    read_progress,
)
from harness.config.values.json_file import read_json
from harness.errors import UserError

SEEN_S = 90.0  # a host of NFS keeps what it knows of a folder for up to 60 s (acdirmax)


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, as far as names and sizes show it; None if nothing is."""
    try:
        if (checkpoint / OLD_STATE).is_file():
            return "an earlier version of ds-harness wrote it, which saved for one layout: resume with that version"
        if not checkpoint.is_dir():
            return "no such directory"
        if not (checkpoint / MANIFEST).is_file():
            return f"{MANIFEST} is missing"
        manifest = read_manifest(checkpoint)
        wrong = next(
            filter(None, (_wrong_size(checkpoint, name, file[0]) for name, file in manifest.files.items())), None
        )
        steps = {MANIFEST: manifest.step, STATE: manifest.step if wrong else read_progress(checkpoint).step}
    except UserError as error:
        return str(error)
    except OSError as error:  # a folder that may not be entered, a path that is too long
        return f"cannot be read: {error.strerror}"
    name = NAME.fullmatch(checkpoint.name)
    if name:
        wrong = wrong or next(
            (f"{file} is of step {step}" for file, step in steps.items() if step != int(name[1])), None
        )
    return wrong


def unlisted(checkpoint: Path) -> list[str]:
    """Return the files in a checkpoint that it was not saved with, without hidden ones; nothing reads them.

    Raises:
        UserError: the manifest cannot be read.
    """
    listed = read_manifest(checkpoint).files
    found = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if not path.is_dir())
    others = (path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts))
    return sorted(name for name in others if name not in listed and name != MANIFEST)


def require_listed_weights(directory: Path) -> None:
    """Raise UserError if a model's directory is a checkpoint with weights that it was not saved with.

    They could be read instead of its own weights, as transformers chooses files by their names.
    """
    if is_checkpoint(directory):
        kinds = (".safetensors", ".bin", ".index.json")
        if others := [name for name in unlisted(directory) if name.endswith(kinds)]:
            raise UserError(f"{directory} contains {others[0]}, which it was not saved with: move it elsewhere")


def is_checkpoint(directory: Path) -> bool:
    """Whether a model's directory is a checkpoint of a run."""
    return (directory / MANIFEST).is_file() and (directory / STATE).is_file()


@contextmanager
def listed_files(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder of links to the files that a checkpoint's manifest lists.

    transformers chooses files by their names, so a planted one could be read in the place of a saved one.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, directory.absolute().name)
        folder.mkdir()
        for file in read_manifest(directory).files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).symlink_to((directory / file).resolve())
        yield folder


def changed_file(checkpoint: Path, share: int, shares: int) -> str | None:
    """Say which file of this rank's share is not what was saved; None if all are.

    It raises nothing, as other ranks wait for the answer.
    """
    try:
        files = sorted(read_manifest(checkpoint).files.items())
    except UserError as error:
        return str(error)
    for name, (_, saved) in files[share::shares]:
        try:
            if _is_special((checkpoint / name).stat().st_mode):
                return f"{name} is not a file"
            if checksum(checkpoint / name) != saved:
                return f"{name} differs from what was saved"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def find_resume(output_dir: Path, wanted: str | None, *, overwrites: bool = False) -> Path | None:
    """Return the checkpoint that `--resume_from_checkpoint` means, None for a fresh start.

    Raises:
        UserError: the named checkpoint is not whole; or this run would overwrite another one, by a fresh start or by
            resuming a checkpoint of a run elsewhere, and the user did not ask for that (`overwrites`).
    """
    if wanted == "auto":
        return newest_whole(output_dir)
    if wanted is not None:
        if reason := damage(Path(wanted)):
            raise UserError(f"--resume_from_checkpoint {wanted}: no whole checkpoint there ({reason})")
        if Path(wanted).resolve().parent == output_dir.resolve():
            return Path(wanted)
    if not overwrites:
        require_unused(output_dir)
    return None if wanted is None else Path(wanted)


def require_unused(output_dir: Path) -> None:
    """Raise UserError if the directory holds a run, which another one would overwrite."""
    if (output_dir / METRICS).exists() or numbered(output_dir):
        raise UserError(
            f"--output_dir {output_dir} already holds a run: give another directory, "
            "--resume_from_checkpoint auto to continue it, or --overwrite_output_dir to begin afresh"
        )


def wait_until_seen(checkpoint: Path, host: str, seconds: float = SEEN_S) -> None:
    """Wait until this host sees a whole checkpoint that another host has completed.

    A host of NFS keeps what it knows of a folder, also that a name is not there, until it asks the server again. To
    open and sync the folder makes it ask.

    Raises:
        UserError: it is still not whole here after some seconds.
    """
    until = time.monotonic() + seconds
    while (found := damage(checkpoint)) is not None:
        if time.monotonic() > until:
            raise UserError(
                f"{checkpoint}: rank 0 resumes from it, but host {host} does not see it whole after {seconds:.0f} s "
                f"({found}): give an --output_dir on a file system that all hosts share"
            )
        for folder in (checkpoint.parent, checkpoint):
            with suppress(OSError):
                sync_folder(folder)
        time.sleep(0.5)


def newest(output_dir: Path, count: int | None, last_step: int) -> list[Path] | None:
    """Return the newest `count` whole checkpoints up to a step, which are kept; None keeps all.

    Checkpoints of later steps do not count: the run is not there yet, so they are left over from before a resume.
    """
    steps = ((step, path) for step, path in reversed(numbered(output_dir)) if step <= last_step)
    whole = (path for _, path in steps if damage(path) is None)
    return None if count is None else list(itertools.islice(whole, count))


def newest_whole(output_dir: Path, before: Path | None = None) -> Path | None:
    """Return the newest whole checkpoint of a run, or the newest whole one that is older than `before`."""
    name = None if before is None else NAME.fullmatch(before.name)  # it may be gone by now
    step = None if name is None else int(name[1])
    others = foreign(output_dir)
    older = (path for number, path in reversed(numbered(output_dir)) if step is None or number < step)
    return next((path for path in older if path not in others and damage(path) is None), None)


def damaged(output_dir: Path, chosen: Path | None) -> list[str]:
    """Return one line for each damaged checkpoint that is newer than the chosen one."""
    newer = []
    for _, path in reversed(numbered(output_dir)):
        if path == chosen:
            break
        newer.append(f"{path} is damaged ({reason})" if (reason := damage(path)) else "")
    return [line for line in newer if line]


def run_id(checkpoint: Path | None) -> str:
    """Return the id of the run that saved a checkpoint; a new one for a run that begins afresh."""
    return (checkpoint and read_manifest(checkpoint).run_id) or uuid4().hex


def foreign(output_dir: Path) -> list[Path]:
    """Return the checkpoints that were saved by another run than that of `output_dir`.

    That run is the one of `run.json`; without this file it is the one that saved more checkpoints than any other.
    """
    ids = {path: _saved_by(path) for _, path in numbered(output_dir)}
    own = _run_of(output_dir)
    if not own:
        (own, most), (_, second) = [*Counter(filter(None, ids.values())).most_common(2), ("", 0), ("", 0)][:2]
        own = own if most > second else ""
    return [path for path, found in ids.items() if own and found and found != own]


def _run_of(output_dir: Path) -> str:
    """Return the id that a directory says of its run; empty where it says none."""
    try:
        found = read_json(output_dir / RUN)["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""


def _saved_by(checkpoint: Path) -> str:
    try:
        return read_manifest(checkpoint).run_id
    except UserError:
        return ""


def _wrong_size(checkpoint: Path, name: str, saved: int) -> str | None:
    try:
        found = (checkpoint / name).stat()
    except OSError:
        return f"{name} is missing"
    if _is_special(found.st_mode):
        return f"{name} is not a file"
    return None if found.st_size == saved else f"{name} has {found.st_size:,} bytes of {saved:,}"


def _is_special(mode: int) -> bool:
    """Whether this is the mode of a pipe, a device or a socket: reading one may never end."""
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
