"""Name, complete, rename and prune the checkpoint folders of a run, `output_dir/checkpoint-STEP`.

A checkpoint is written under another name and renamed at the end, so a process killed half-way leaves no folder that
looks like a checkpoint. `manifest.json`, the list of its files, is written just before the rename. `state.json`
holds the state of the run (`TrainingProgress`). Imports no torch.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, get_args, get_origin, get_type_hints

from xxhash import xxh3_128

from harness.atomic import exchange, free_name, rename_folder, sync_file, sync_folder
from harness.config import Resolved
from harness.config.values.json_file import member, read_object
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.optimizers import DEFAULT

MANIFEST = "manifest.json"
FORMAT = 1
CHUNK = 16 << 20  # bytes hashed at a time

Files = dict[str, tuple[int, str]]
"""Size in bytes and XXH3 (128 bits, hexadecimal) of each file, by its path in the checkpoint."""
NAME = re.compile(r"checkpoint-([0-9]+)")
UNFINISHED_NAME = re.compile(r"writing-(checkpoint|replaced|removed)-[0-9]+")
STATE = "state.json"
MODEL = "model"  # name, without suffix, of the files of weights
ADAPTERS = "adapter_model"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
RESTARTS = "restarts.jsonl"  # one line for each fault that `ds-harness launch` saw
RUN = "run.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`: optimizer steps done, id of the saving run, and all files."""

    step: int
    run_id: str
    files: Files


def contents(folder: Path, share: int = 0, shares: int = 1) -> Files:
    """Return size and checksum of the files in a folder; with `shares`, of every `shares`-th file from `share` on.

    This lets ranks share the hashing.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): (path.stat().st_size, checksum(path)) for path in files[share::shares]}


def write_manifest(folder: Path, step: int, files: Mapping[str, tuple[int, str]], run_id: str = "") -> None:
    stated = {"format": FORMAT, "step": step, "run_id": run_id, "files": dict(sorted(files.items()))}
    (folder / MANIFEST).write_text(json.dumps(stated, indent=1) + "\n", encoding="utf-8")


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's `manifest.json`. Raises UserError if it cannot be read or is from a newer version."""
    path = checkpoint / MANIFEST
    try:
        stated = read_object(path)
        if member(stated, "format", int) > FORMAT:
            raise UserError(f"{path} was written by a newer version of ds-harness: resume with that version")
        return Manifest(
            step=_count(stated.get("step")),
            run_id=str(stated.get("run_id", "")),
            files={_inside(name): _size_and_checksum(file) for name, file in member(stated, "files", dict).items()},
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _size_and_checksum(stated: object) -> tuple[int, str]:
    match stated:
        case [size, str(digest)]:
            return _count(size), digest
        case _:
            raise ValueError(f"{str(stated)[:60]!r} is not a size and a checksum")


def _inside(name: str) -> str:
    """Return a file's path. Raises ValueError if it leads outside the checkpoint or is not a path."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or b"\0" in os.fsencode(name):
        raise ValueError(f"{name!r} is not a file inside it")
    return name


def _count(value: object) -> int:
    # An edited file may contain a number of a million digits.
    if type(value) is not int or not 0 <= value <= 2**80:
        raise ValueError(f"{value!r} is not a count")
    return value


def checksum(path: Path) -> str:
    """Return the 128-bit XXH3 of a file's content in hexadecimal."""
    total = xxh3_128()
    at = 0
    chunk = bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            at += count
            # The system reads the next chunk from disk while this one is hashed.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), at, CHUNK, os.POSIX_FADV_WILLNEED)
            total.update(memoryview(chunk)[:count])
    return total.hexdigest()


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The state of a run besides its tensors: the content of `state.json`.

    Attributes:
        step: optimizer steps done.
        consumed_samples: samples consumed by all ranks together.
        layout: layout of the saving run, as `Layout` prints it; any layout can resume it.
        zero_stage: 0 to 3; any ZeRO stage can resume it.
        precision: fp32, bf16 or fp16; any precision can resume it.
        seed: seed of the order of samples.
        data: digest of the training data.
        adapters: settings of the trained adapters as JSON; "" if the weights themselves are trained.
        objective: settings of the objective, such as preferences; "" for the next token, or a user's own loss.
        base: checksums of the base model's weights by name; empty without adapters.
        model: layers and sizes as text.
        model_config: HuggingFace config entries that change the computation.
        optimizer: the optimizer's name.
        hyperparameters: learning rate, schedule and other settings that a resumed run may change.
        run_id: id of the saving run.
        skipped_steps: steps among `step` without an update (fp16 overflow).
        skipped_samples: ranges [first, stop) of the sample order that are skipped.
        optimizer_states: names of the optimizer's tensors for each weight (`exp_avg`), one file each; empty before the
            first step.
        counters: scalar counters of the optimizer, such as its number of steps.
        best: the best evaluation so far and its metric.
        model_only: whether optimizer states were omitted, so that no run can resume it.
        loss_scaling: the state of the fp16 loss scaler; empty for other precisions.
        stream: the position in streamed training data; empty for other data.
        evaluation_due: whether a signal or an error ended the run before this step was evaluated.
    """

    step: int
    consumed_samples: int
    layout: str
    zero_stage: int
    precision: str
    seed: int
    data: str
    adapters: str = ""
    objective: str = ""
    base: dict[str, str] = field(default_factory=dict)
    model: str = ""
    model_config: JsonObject = field(default_factory=dict)
    optimizer: str = ""
    hyperparameters: JsonObject = field(default_factory=dict)
    run_id: str = ""
    skipped_steps: int = 0
    skipped_samples: list[list[int]] = field(default_factory=list)
    optimizer_states: list[str] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    loss_scaling: dict[str, float] = field(default_factory=dict)
    best: JsonObject = field(default_factory=dict)
    model_only: bool = False
    stream: JsonObject = field(default_factory=dict)
    evaluation_due: bool = False

    @property
    def trained_samples(self) -> int:
        """The number of samples trained on: samples consumed minus samples skipped."""
        left_out = [stop - first for first, stop in self.skipped_samples if stop <= self.consumed_samples]
        return self.consumed_samples - sum(left_out)


def partial_name(step: int) -> str:
    return f"writing-checkpoint-{step}"


def finished_name(step: int) -> str:
    return f"checkpoint-{step}"


def numbered(output_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all folders named like a checkpoint, complete or damaged, oldest first."""
    matches = ((NAME.fullmatch(path.name), path) for path in output_dir.glob("checkpoint-*"))
    return sorted((int(match.group(1)), path) for match, path in matches if match and path.is_dir())


def read_progress(checkpoint: Path) -> TrainingProgress:
    """Read a checkpoint's `state.json`. Raises UserError if it cannot be read."""
    path = checkpoint / STATE
    try:
        stated = read_object(path)
        # A later version may have written fields that this one does not know.
        known = fields(TrainingProgress)
        for item in known:
            if item.name not in stated and item.default is MISSING and item.default_factory is MISSING:
                raise ValueError(f"{item.name} is missing")
        # An edited file may contain values of other types.
        for name, kind in get_type_hints(TrainingProgress).items():
            if name in stated and not _is_of(stated[name], kind):
                raise ValueError(f"{name} is {stated[name]!r}")
        return TrainingProgress(**{item.name: stated[item.name] for item in known if item.name in stated})
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _is_of(value: object, kind: object) -> bool:
    """Return whether a JSON value has the type of a field. An integer may be a float, but true is not a number."""
    match get_origin(kind), get_args(kind):
        case builtins.list, (element,):
            return isinstance(value, list) and all(_is_of(each, element) for each in value)
        case builtins.dict, (_, element):
            return isinstance(value, dict) and all(_is_of(each, element) for each in value.values())
    if type(value) is int and abs(value) > 2**80:
        return False
    return kind is Any or type(value) is kind or (kind is float and type(value) is int)


def optimizer_name(resolved: Resolved) -> str:
    """Return the name of a run's optimizer; the default's if the JSON names none."""
    return str(resolved.config.get("optimizer", {}).get("type", DEFAULT.name))


def finish(output_dir: Path, progress: TrainingProgress, files: Mapping[str, tuple[int, str]]) -> Path:
    """Complete a checkpoint whose `files` are written: write state and manifest, then rename. One rank calls it."""
    partial = output_dir / partial_name(progress.step)
    final = output_dir / finished_name(progress.step)
    (partial / STATE).write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")
    stated = (partial / STATE).stat().st_size, checksum(partial / STATE)
    write_manifest(partial, progress.step, {**files, STATE: stated}, progress.run_id)
    # All on disk before the rename: a folder of the final name counts as complete, and must not hold empty files after
    # a power failure.
    for path in partial.rglob("*"):
        if path.is_file():
            sync_file(path)
    sync_folder(partial)
    replaced = output_dir / f"writing-replaced-{progress.step}"
    # A run may have been killed while deleting it.
    remove([replaced])
    # `exists` would miss a broken link of that name.
    if not os.path.lexists(final):
        partial.rename(final)
    # Without an atomic exchange (NFS), no folder has the final name for a moment, in which a killed run loses it.
    elif not exchange(partial, final):
        try:
            final.rename(replaced)
        except OSError as error:
            # overlayfs cannot rename the folder: see `rename_folder`.
            if error.errno != errno.EXDEV:
                raise
            remove([final])
        partial.rename(final)
    remove([partial, replaced])
    sync_folder(output_dir)
    return final


def set_aside_newer(output_dir: Path, resumed: Path) -> list[Path]:
    """Rename checkpoints newer than the resumed one to `abandoned-...`; return their new paths."""
    # The run repeats their steps, so they must not count as the newest. `resumed` may have any name, so its own step
    # decides.
    step = read_progress(resumed).step
    return [_renamed(path, "abandoned") for number, path in numbered(output_dir) if number > step]


def set_aside_foreign(paths: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Rename checkpoints of another run to `foreign-...`; return (old, new) paths."""
    return [(path, _renamed(path, "foreign")) for path in paths]


def _renamed(checkpoint: Path, word: str) -> Path:
    target = checkpoint.with_name(f"{word}-{checkpoint.name}")
    return rename_folder(checkpoint, free_name(target) if os.path.lexists(target) else target)


def prune(output_dir: Path, kept: Sequence[Path] | None, best: Path | None = None) -> list[Path]:
    """Rename checkpoints older than all of `kept` (None: keep all), except the best one.

    Returns the folders to delete, including leftovers of unfinished saves and folders that cannot be renamed
    (overlayfs).
    """
    # Not deleted here: that takes long, so the caller does it in the background.
    fixed = []
    for step, path in numbered(output_dir) if kept else []:
        if kept and path in kept:
            break
        if path != best:
            try:
                path.rename(output_dir / f"writing-removed-{step}")
            except OSError as error:
                # Any other error leaves the folder as it is: the next save tries again.
                fixed += [path] if error.errno == errno.EXDEV else []
    return [*fixed, *(path for path in output_dir.glob("writing-*") if UNFINISHED_NAME.fullmatch(path.name))]


def remove(folders: Sequence[Path]) -> None:
    """Delete folders as far as permitted. Of a link to a folder, delete only the link."""
    for folder in folders:
        # It refuses links, and files are not folders: both are unlinked.
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.unlink()


def set_aside(path: Path) -> Path | None:
    """Rename an earlier run's file or folder to a free name like `metrics.1.jsonl`; return it, or None if empty."""
    if not path.is_dir() and not (path.is_file() and path.stat().st_size):
        return None
    return rename_folder(path, free_name(path)) if path.is_dir() else path.rename(free_name(path))
