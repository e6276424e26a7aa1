"""Verify checkpoints against their manifests, which list all files with sizes and checksums; choose one to resume.

Sizes are checked before the model is built. Checksums are checked before anything is loaded, with the files split over
all ranks: if a rank found a damaged file only while loading, the others would wait for it in a collective. Imports no
torch.
"""

from __future__ import annotations

import itertools
import re
import stat
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from harness.atomic import sync_folder
from harness.checkpoint.directories import (
    ADAPTERS,
    MANIFEST,
    METRICS,
    MODEL,
    NAME,
    RUN,
    STATE,
    TrainingProgress,
    checksum,
    numbered,
    read_manifest,
    read_progress,
)
from harness.config.values.json_file import object_or_empty
from harness.errors import UserError

MOST_A_STEP = 1 << 24  # samples in a global batch
SEEN_S = 90.0  # an NFS client caches a folder's entries for up to 60 s (acdirmax)
_WRITTEN_BY = {
    "trainer_state.json": "a checkpoint of the HuggingFace Trainer",
    "random_states_0.pkl": "a checkpoint of accelerate",
    "zero_to_fp32.py": "a checkpoint of DeepSpeed",
    "mp_rank_00_model_states.pt": "a checkpoint of DeepSpeed",
    ".metadata": "a checkpoint of torch.distributed",
    "adapter_config.json": "adapters of peft",
    "config.json": "a model",
}
"""Name of a file -> the kind of a foreign directory that holds it; the first existing file counts."""


def damage(checkpoint: Path) -> str | None:
    """Check names and sizes of a checkpoint's files. Returns the first problem, or None."""
    try:
        if not checkpoint.is_dir():
            return "no such directory"
        if not (checkpoint / MANIFEST).is_file():
            return _not_ours(checkpoint) or f"{MANIFEST} is missing"
        manifest = read_manifest(checkpoint)
        wrong = next(
            filter(None, (_wrong_size(checkpoint, name, file[0]) for name, file in manifest.files.items())), None
        )
        progress = None if wrong else read_progress(checkpoint)
        if progress is not None:
            wrong = _missing_entry(manifest.files, progress) or _implausible(progress)
        steps = {MANIFEST: manifest.step, STATE: manifest.step if progress is None else progress.step}
    except UserError as error:
        return str(error)
    except OSError as error:  # a folder without permission, a path that is too long
        return f"cannot be read: {error.strerror}"
    name = NAME.fullmatch(checkpoint.name)
    if name:
        wrong = wrong or next(
            (f"{file} is of step {step}" for file, step in steps.items() if step != int(name[1])), None
        )
    return wrong


def _not_ours(directory: Path) -> str | None:
    """Return the kind of a directory without a manifest, and a remedy; None for an unknown kind."""
    if inside := numbered(directory):
        return f"the checkpoints are in it: name one, such as {max(inside)[1].name}"
    names = {path.name for path in directory.iterdir()}
    written = next((words for name, words in _WRITTEN_BY.items() if name in names), None)
    if written is None:
        return None
    if "config.json" in names and any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        remedy = f"start a new run from its weights with --model_name_or_path {directory}"
    elif "adapter_config.json" in names:
        remedy = "merge them into their model (ds-harness checkpoint merge), and start a new run from that"
    elif "zero_to_fp32.py" in names:
        remedy = "turn its weights into a model with its zero_to_fp32.py, and start a new run from that"
    else:
        remedy = "load it where it was written, save the model with save_pretrained, and start a new run from that"
    whose = ", which only that program can continue" if "checkpoint" in written else ""
    return f"it is {written}{whose}: {remedy}"


def unlisted(checkpoint: Path) -> list[str]:
    """Return the files that a checkpoint's manifest does not list, except hidden ones: no run reads them.

    Raises UserError if the manifest cannot be read.
    """
    listed = read_manifest(checkpoint).files
    found = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if not path.is_dir())
    others = (path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts))
    return sorted(name for name in others if name not in listed and name != MANIFEST)


def require_listed_weights(directory: Path) -> None:
    """Raise UserError if a directory is a checkpoint with weight files that its manifest does not list."""
    # transformers selects files by name, so it could read these instead of the saved weights.
    if is_checkpoint(directory):
        kinds = (".safetensors", ".bin", ".index.json")
        if others := [name for name in unlisted(directory) if name.endswith(kinds)]:
            raise UserError(f"{directory} contains {others[0]}, which it was not saved with: move it elsewhere")


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory is a checkpoint of a run, complete or not."""
    return (directory / MANIFEST).is_file() and (directory / STATE).is_file()


def changed_file(checkpoint: Path, share: int, shares: int) -> str | None:
    """Compare the checksums of this rank's share of the files. Returns the first problem, or None.

    Never raises UserError or OSError, because the other ranks wait for the answer in a collective.
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
    """Return the checkpoint that `--resume_from_checkpoint` names; None for a fresh start.

    Raises UserError if the named checkpoint is damaged, or if `output_dir` holds a run that this one would overwrite
    and the user did not allow it (`overwrites`).
    """
    if wanted == "auto":
        return newest_whole(output_dir)
    if wanted is not None:
        if reason := damage(Path(wanted)):
            raise UserError(f"--resume_from_checkpoint {wanted}: no whole checkpoint there ({reason})")
        # A checkpoint in `output_dir` is of this run itself, which continues there and overwrites nothing.
        if Path(wanted).resolve().parent == output_dir.resolve():
            return Path(wanted)
    if not overwrites:
        require_unused(output_dir)
    return None if wanted is None else Path(wanted)


def require_unused(output_dir: Path) -> None:
    """Raise UserError if the directory already holds a run."""
    if (output_dir / METRICS).exists() or numbered(output_dir):
        raise UserError(
            f"--output_dir {output_dir} already holds a run: give another directory, "
            "--resume_from_checkpoint auto to continue it, or --overwrite_output_dir to begin afresh"
        )


def wait_until_seen(checkpoint: Path, host: str, seconds: float = SEEN_S) -> None:
    """Wait until this host sees a checkpoint that another host has completed.

    Raises UserError if the checkpoint is still incomplete on this host after `seconds`.
    """
    until = time.monotonic() + seconds
    while (found := damage(checkpoint)) is not None:
        if time.monotonic() > until:
            raise UserError(
                f"{checkpoint}: rank 0 sees it, but host {host} does not see it whole after {seconds:.0f} s "
                f"({found}): give an --output_dir on a file system that all hosts share"
            )
        # An NFS client caches a folder's entries, and also which names do not exist. Opening and syncing the folder
        # makes it ask the server again.
        for folder in (checkpoint.parent, checkpoint):
            with suppress(OSError):
                sync_folder(folder)
        time.sleep(0.5)


def newest(output_dir: Path, count: int | None, last_step: int) -> list[Path] | None:
    """Return the checkpoints to keep: the newest `count` complete ones up to `last_step`; None to keep all."""
    # The run has not reached later steps, so their checkpoints are left over from before a resume.
    steps = ((step, path) for step, path in reversed(numbered(output_dir)) if step <= last_step)
    whole = (path for _, path in steps if damage(path) is None)
    return None if count is None else list(itertools.islice(whole, count))


def newest_whole(output_dir: Path, before: Path | None = None) -> Path | None:
    """Return the newest complete checkpoint of a run, or None; with `before`, only older ones count."""
    # By its name, as the folder may have been deleted.
    name = None if before is None else NAME.fullmatch(before.name)
    step = None if name is None else int(name[1])
    others = foreign(output_dir)
    older = (path for number, path in reversed(numbered(output_dir)) if step is None or number < step)
    return next((path for path in older if path not in others and damage(path) is None), None)


def damaged(output_dir: Path, chosen: Path | None) -> list[str]:
    """Return one line for each damaged checkpoint newer than the chosen one."""
    newer = []
    for _, path in reversed(numbered(output_dir)):
        if path == chosen:
            break
        newer.append(f"{path} is damaged ({reason})" if (reason := damage(path)) else "")
    return [line for line in newer if line]


def run_id(checkpoint: Path | None) -> str:
    """Return the id of the run that saved a checkpoint, or a new id for a fresh start."""
    return (checkpoint and read_manifest(checkpoint).run_id) or uuid4().hex


def foreign(output_dir: Path) -> list[Path]:
    """Return the checkpoints in `output_dir` that another run saved.

    The directory's own run is named in `run.json`; without that file, it is the run that saved most checkpoints.
    """
    ids: dict[Path, str] = {}
    for _, path in numbered(output_dir):
        with suppress(UserError):
            ids[path] = read_manifest(path).run_id
    own = own_run(output_dir)
    if not own:
        ranked = Counter(filter(None, ids.values())).most_common(2)
        # In a tie nobody can tell whose directory it is, so nothing in it counts as foreign.
        if len(ranked) == 1 or (ranked and ranked[0][1] > ranked[1][1]):
            own = ranked[0][0]
    return [path for path, found in ids.items() if own and found and found != own]


def own_run(output_dir: Path) -> str:
    """Return the id of the run that a directory belongs to, from `run.json`; "" for a new directory."""
    found = object_or_empty(output_dir / RUN).get("run_id")
    return found if isinstance(found, str) else ""


def _wrong_size(checkpoint: Path, name: str, saved: int) -> str | None:
    try:
        found = (checkpoint / name).stat()
    except OSError:
        return f"{name} is missing"
    if _is_special(found.st_mode):
        return f"{name} is not a file"
    return None if found.st_size == saved else f"{name} has {found.st_size:,} bytes of {saved:,}"


def _missing_entry(files: Collection[str], progress: TrainingProgress) -> str | None:
    """Return a problem if a manifest's `files` lack one that a run needs to continue, or None."""
    if STATE not in files:
        return f"{MANIFEST} does not list {STATE}"
    for stem in (ADAPTERS if progress.adapters else MODEL, *progress.optimizer_states):
        # A single file, or all files of a split one, whose number is in their names.
        name = re.compile(rf"{re.escape(stem)}(?:-\d{{5}}-of-(\d{{5}}))?\.safetensors")
        parts = list(filter(None, map(name.fullmatch, files)))
        if not parts or len(parts) != int(parts[0][1] or 1):
            return f"{MANIFEST} does not list {'all files of ' * bool(parts)}{stem}"
    return None


def _implausible(progress: TrainingProgress) -> str | None:
    """Return a count that no run can have reached, as in an edited file, or None."""
    for name in ("step", "consumed_samples", "skipped_steps"):
        if getattr(progress, name) < 0:
            return f"{STATE}: {name} is {getattr(progress, name)}"
    if any(len(each) != 2 or not 0 <= each[0] < each[1] for each in progress.skipped_samples):
        return f"{STATE}: skipped_samples is {progress.skipped_samples}"
    # A step consumes at least one sample, and trains on at most MOST_A_STEP.
    if not progress.step <= progress.consumed_samples or progress.trained_samples > progress.step * MOST_A_STEP:
        return f"{STATE}: consumed_samples is {progress.consumed_samples} at step {progress.step}"
    return None


def _is_special(mode: int) -> bool:
    """Return whether a file mode is a pipe, device or socket, which could block a reader forever."""
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
