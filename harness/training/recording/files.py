"""Write `run.json` (command, date, code, hosts, data, versions) and append to `metrics.jsonl`."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from harness.arguments.themes.script import PYTHON_STDLIB
from harness.atomic import open_no_link, replace_text
from harness.checkpoint.directories import RUN
from harness.config.values.json_file import parse_json, read_json
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import Secrets, masked_by_name
from harness.console import warn
from harness.data.files.sources import TOKENS, find_files, find_tokens, source_groups
from harness.data.preview import composition
from harness.errors import UserError, reason
from harness.resilience.process.activity import CLOCK
from harness.topology.env import inherited
from harness.training.callbacks import StepRecord

if TYPE_CHECKING:  # benchmarks use `versions` without importing training
    from harness.training.prepare.run import Run

DATA_FLAGS = ("train_file", "validation_file")
MOST_FILES = 1000
# What git may run by a checkout's own config: a monitor of files, hooks (one when it writes the index), filters when it
# compares contents, programs of a remote when it fetches missing objects.
WITHOUT_PROGRAMS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
PROGRAMS = r"filter\..*\.(clean|process)|extensions\.partialclone|remote\..*\.promisor"
PROGRAM = re.compile(rf"(local|worktree)\s+({PROGRAMS})\b")


def origin(run: Run, hosts: Sequence[str]) -> JsonObject:
    """Return the origin of a run for `run.json`: command, date, git state, data, tokenizer. `hosts`: of each rank."""
    tokenizer = run.data.tokenizer
    return {
        "command": masked_by_name(shlex.join([sys.executable, *sys.argv])),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "git": git_state(Path.cwd()),
        "hosts": list(hosts),
        "data": {**data_files(run.flags), "digest": run.data_digest, **composition(run.data.train)},
        "tokenizer": None
        if tokenizer is None
        else {
            "class": type(tokenizer).__name__,
            "name_or_path": getattr(tokenizer, "name_or_path", ""),
            "size": len(tokenizer),
        },
    }


def data_files(flags: Mapping[str, object]) -> JsonObject:
    """Return the files that the script's flags name, with sizes in bytes; only the first 1,000 are listed."""
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
        except (OSError, UserError) as error:  # deleted since they were read
            found[name] = {"unreadable": str(error)}
            continue
        listed = {} if PYTHON_STDLIB in dict(paths).values() else dict(list(sizes.items())[:MOST_FILES])
        found[name] = {"files": len(sizes), "bytes": sum(sizes.values()), "sizes": listed}
    return found


def git_state(folder: Path) -> JsonObject | None:
    """Return commit, branch and whether tracked files have changes; None outside a git checkout.

    Nothing that the checkout's own config names is executed, because the folder may come from somebody else. "changed"
    is None where git would have to.
    """
    environment = {**inherited(), "GIT_NO_LAZY_FETCH": "1"}

    def git(*words: str) -> str:
        command = ["git", *WITHOUT_PROGRAMS, "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True, env=environment)
        return done.stdout.strip()

    try:
        runs_programs = any(map(PROGRAM.match, git("config", "--list", "--show-scope").splitlines()))
        status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
        return {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "changed": None if runs_programs else bool(git(*status)),
        }
    except (OSError, subprocess.SubprocessError):
        return None


PACKAGES = ("ds-harness", "deepspeed", "torch", "transformers", "datasets")


class MetricsFile:
    """Appends JSON objects to a file, one a line. A resumed run first drops the lines after its checkpoint's step."""

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        self._waiting = b""  # lines that could not be written yet
        self._secrets = Secrets.known()
        self._file = self._cut(first_step)

    def write(self, record: StepRecord | JsonObject) -> None:
        """Append one object, unbuffered, so that it survives a kill. If that fails, warn and try again later."""
        content = record.as_dict() if isinstance(record, StepRecord) else record
        self._waiting += (json.dumps(_finite(self._secrets.without(content)), default=str) + "\n").encode()
        self._attempt(self._reopen)
        self._attempt(self._flush)

    def rewind(self, step: int) -> None:
        """Drop the lines of steps after `step`."""
        self.close()
        self._attempt(lambda: setattr(self, "_file", self._cut(step + 1)))

    def close(self) -> None:
        """Write waiting lines, and close the file."""
        self._attempt(self._flush)
        self._file.close()

    def _flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def _cut(self, first_step: int) -> FileIO:
        """Open the file, and drop the lines of `first_step` and later steps, and lines that are no metrics.

        The file is truncated at the first line to drop, which works even on a full disk. Later lines that must stay are
        written again with the next write.
        """
        # opening a pipe would block, and a link may lead to a file of others
        if self._path.is_symlink() or (self._path.exists() and not self._path.is_file()):
            raise UserError(f"{self._path}: it is not a file: move it elsewhere")
        there = self._path.read_bytes() if self._path.is_file() else b""
        lines = (there + self._waiting).splitlines(keepends=True)
        stays = [_is_before(line, first_step) for line in lines]
        size = min(len(there), sum(map(len, itertools.compress(lines, itertools.accumulate(stays, min)))))
        self._waiting = b"".join(itertools.compress(lines, stays))[size:]
        file = self._opened()
        file.truncate(size)
        return file

    def _opened(self) -> FileIO:
        return FileIO(self._path, "ab", opener=open_no_link)

    def _reopen(self) -> None:
        """Continue in a new file if somebody has deleted this one or its folder."""
        with suppress(FileNotFoundError):
            if not self._file.closed and os.path.samestat(self._path.lstat(), os.fstat(self._file.fileno())):
                return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        gone, self._file = self._file, self._opened()
        gone.close()
        warn(f"{self._path}: it was deleted; metrics continue in a new file")

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run an action, and warn if it fails, as on a full disk: training continues, and lines wait in memory."""
        try:
            action()
        except OSError as error:
            warn(f"{self._path}: cannot be written: {reason(error)}; training continues")


def write_run(output_dir: Path, content: JsonObject) -> None:
    """Write `run.json`: `content` without secrets, and package versions. OSError if that fails."""
    content = {**Secrets.known(content).without(content), "versions": versions()}
    replace_text(output_dir / RUN, json.dumps(content, indent=2, default=str) + "\n")


def note_wall_clock(output_dir: Path, first_step: float | None = None) -> None:
    """Add to `run.json` how this process has spent its time, in seconds; without `first_step` keep its old value."""
    path = output_dir / RUN
    # A full disk, or a file that somebody has replaced, is not worth an error.
    with suppress(OSError, ValueError, AttributeError, TypeError):
        content = read_json(path)
        first_step = first_step or content.get("wall_clock", {}).get("first_step")
        content["wall_clock"] = {**CLOCK.seconds(), "first_step": first_step}
        content["longest_save_s"] = CLOCK.longest_s("saving")
        replace_text(path, json.dumps(content, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the main packages."""
    return {"python": platform.python_version(), **{name: _installed(name) for name in PACKAGES}}


@cache
def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _is_before(line: bytes, first_step: int) -> bool:
    """Return whether this is a complete line of a step before `first_step`."""
    try:
        return line.endswith(b"\n") and bool(parse_json(line)["step"] < first_step)
    except (ValueError, KeyError, TypeError):
        return False


def _finite(content: JsonObject) -> JsonObject:
    """Replace NaN and infinity by null, as JSON has neither."""
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
