"""`run.json`: what a run was started with, when, from what code and where, and with which versions."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path

from harness.arguments.themes.script import PYTHON_STDLIB
from harness.checkpoint.atomic import replace_text
from harness.checkpoint.directories import RUN
from harness.config.values.json_file import parse_json, read_json
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import Secrets, masked_by_name
from harness.data.files.sources import TOKENS, find_files, find_tokens, source_groups
from harness.data.preview import composition
from harness.errors import UserError, reason
from harness.resilience.process.wall_clock import CLOCK
from harness.training.callbacks import StepRecord
from harness.training.run import Run

DATA_FLAGS = ("train_file", "validation_file")
MOST_FILES = 1000


def origin(run: Run, hosts: Sequence[str]) -> JsonObject:
    """Return what a run was started with, when, from what code and where; `hosts`: of each rank."""
    tokenizer = run.data.tokenizer
    return {
        "command": masked_by_name(shlex.join([sys.executable, *sys.argv])),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "git": git_state(Path.cwd()),
        "hosts": list(hosts),
        "data": {**data_files(run.flags), "digest": run.digest, **composition(run.data.train)},
        "tokenizer": None
        if tokenizer is None
        else {
            "class": type(tokenizer).__name__,
            "name_or_path": getattr(tokenizer, "name_or_path", ""),
            "size": len(tokenizer),
        },
    }


def data_files(flags: Mapping[str, object]) -> JsonObject:
    """Return the files behind the script's flags, with their sizes in bytes; the first ones where there are many."""
    found: JsonObject = {}
    for name in DATA_FLAGS:
        given = flags.get(name)
        if not given:
            continue
        words = (given,) if isinstance(given, str) else tuple(given)  # type: ignore[arg-type]  # a flag's words
        try:
            groups = source_groups(words)
            paths = [(group.kind, path) for group in groups for path in group.paths]
            files = [file for kind, path in paths for file in (find_tokens if kind == TOKENS else find_files)(path)]
            sizes = {str(file): file.stat().st_size for file in files}
        except (OSError, UserError) as error:  # removed since they were read
            found[name] = {"unreadable": str(error)}
            continue
        listed = {} if PYTHON_STDLIB in dict(paths).values() else dict(list(sizes.items())[:MOST_FILES])
        found[name] = {"files": len(sizes), "bytes": sum(sizes.values()), "sizes": listed}
    return found


def git_state(folder: Path) -> JsonObject | None:
    """Return commit, branch and whether tracked files are changed; None outside of a git checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


PACKAGES = ("ds-harness", "deepspeed", "torch", "transformers", "datasets")


class MetricsFile:
    """Appends objects to a file, one a line; a resumed run drops those of the steps after its checkpoint first."""

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        self._waiting = b""  # what could not be written yet
        self._secrets = Secrets.known()
        self._file = self._cut(first_step)

    def write(self, record: StepRecord | JsonObject) -> None:
        """Append one object and hand it to the operating system, so that a killed run keeps it."""
        content = record.as_dict() if isinstance(record, StepRecord) else record
        self._waiting += (json.dumps(_finite(self._secrets.without(content)), default=str) + "\n").encode()
        self._attempt(self._reopen)
        self._attempt(self._flush)

    def rewind(self, step: int) -> None:
        """Drop the steps after `step`."""
        self.close()
        self._attempt(lambda: setattr(self, "_file", self._cut(step + 1)))

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._attempt(self._flush)
        self._file.close()

    def _flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def _cut(self, first_step: int) -> FileIO:
        """Open the file without the lines of `first_step` and later ones, and without what is no line of ours.

        The file is cut where the first of them begins, which a full disk allows; what is to stay after it waits.
        """
        if self._path.exists() and not self._path.is_file():  # a pipe would be waited for
            raise UserError(f"{self._path}: it is not a file: move it elsewhere")
        there = self._path.read_bytes() if self._path.is_file() else b""
        lines = (there + self._waiting).splitlines(keepends=True)
        stays = [_is_before(line, first_step) for line in lines]
        size = min(len(there), sum(map(len, itertools.compress(lines, itertools.accumulate(stays, min)))))
        self._waiting = b"".join(itertools.compress(lines, stays))[size:]
        file = self._path.open("ab", buffering=0)
        file.truncate(size)
        return file

    def _reopen(self) -> None:
        """Go on in a new file if somebody has removed this one, or its folder."""
        with suppress(FileNotFoundError):
            if not self._file.closed and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        gone, self._file = self._file, self._path.open("ab", buffering=0)
        gone.close()
        warnings.warn(f"{self._path}: it was removed; metrics go on in a new file", stacklevel=4)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Warn if an action fails, as on a full disk: training is worth more than its metrics, which wait in memory."""
        try:
            action()
        except OSError as error:
            warnings.warn(f"{self._path}: cannot be written: {reason(error)}; training continues", stacklevel=3)


def write_run(output_dir: Path, content: JsonObject) -> None:
    """Write `run.json`: what is given but for secrets, and the versions it ran with."""
    content = {**Secrets.known(content).without(content), "versions": versions()}
    replace_text(output_dir / RUN, json.dumps(content, indent=2, default=str) + "\n")


def note_wall_clock(output_dir: Path, first_step: float | None = None) -> None:
    """Write into `run.json` where this process' time has gone so far; `first_step`: seconds, kept if not given."""
    path = output_dir / RUN
    # a full disk, or somebody's own file: the run has its numbers all the same
    with suppress(OSError, ValueError, AttributeError, TypeError):
        content = read_json(path)
        first_step = first_step or content.get("wall_clock", {}).get("first_step")
        content["wall_clock"] = {**CLOCK.seconds(), "first_step": first_step}
        content["longest_save_s"] = CLOCK.longest_s("saving")
        replace_text(path, json.dumps(content, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide about a run."""
    return {"python": platform.python_version(), **{name: _installed(name) for name in PACKAGES}}


@cache
def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _is_before(line: bytes, first_step: int) -> bool:
    """Whether this is a whole line of a step before `first_step`."""
    try:
        return line.endswith(b"\n") and bool(parse_json(line)["step"] < first_step)
    except (ValueError, KeyError, TypeError):
        return False


def _finite(content: JsonObject) -> JsonObject:
    """JSON has no NaN and no infinity: null stands for them."""
    return {key: _or_null(value) for key, value in content.items()}


def _or_null(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _or_null(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_or_null(inner) for inner in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def write_object(path: Path, content: Mapping[str, object]) -> None:
    """Write an object as JSON, without secrets. UserError if that fails."""
    plain: JsonObject = Secrets.known().without(content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {reason(error, path.parent)}") from error
