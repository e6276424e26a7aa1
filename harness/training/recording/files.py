"""Write `run.json`: command, date, code, hosts, data, versions."""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from harness.atomic import replace_text
from harness.checkpoint.directories import RUN
from harness.config.values.json_file import read_json
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import Secrets, masked_by_name
from harness.errors import UserError, reason
from harness.resilience.process.activity import CLOCK
from harness.topology.env import inherited

if TYPE_CHECKING:  # benchmarks use `versions` without importing training
    from harness.training.prepare.run import Run

# What git may run by a checkout's own config: a monitor of files, hooks (one when it writes the index), filters when it
# compares contents, programs of a remote when it fetches missing objects.
WITHOUT_PROGRAMS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
PROGRAMS = r"filter\..*\.(clean|process)|extensions\.partialclone|remote\..*\.promisor"
PROGRAM = re.compile(rf"(local|worktree)\s+({PROGRAMS})\b")


def origin(run: Run, hosts: Sequence[str]) -> JsonObject:
    """Return a run's origin for `run.json`: command, date, git state, the host of each rank, data, tokenizer."""
    tokenizer, part = run.spec.data.tokenizer, run.spec.parts.data
    files, composition = (
        ({}, {}) if part is None else (part.data_files(run.spec.inputs.flags), part.composition(run.spec.data.train))
    )
    return {
        "command": masked_by_name(shlex.join([sys.executable, *sys.argv])),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "git": git_state(Path.cwd()),
        "hosts": list(hosts),
        "data": {**files, "digest": run.spec.data_digest, **composition},
        "tokenizer": None
        if tokenizer is None
        else {
            "class": type(tokenizer).__name__,
            "name_or_path": getattr(tokenizer, "name_or_path", ""),
            "size": len(tokenizer),
        },
    }


def git_state(folder: Path) -> JsonObject | None:
    """Return commit, branch and whether tracked files have changes; None outside a git checkout.

    The folder may come from somebody else, so no program named in the checkout's own config is executed. "changed" is
    None if git would have to run one.
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


def write_run(output_dir: Path, content: JsonObject) -> None:
    """Write `run.json`: `content` without secrets, and package versions. Raises OSError if that fails."""
    content = {**Secrets.known(content).without(content), "versions": versions()}
    replace_text(output_dir / RUN, json.dumps(content, indent=2, default=str) + "\n")


def note_wall_clock(output_dir: Path, first_step: float | None = None) -> None:
    """Add to `run.json` how this process spent its time, in seconds; without `first_step`, keep the old value."""
    path = output_dir / RUN
    # A full disk or a replaced file is not worth an error at the end of a run.
    with suppress(OSError, ValueError, AttributeError, TypeError):
        content = read_json(path)
        first_step = first_step or content.get("wall_clock", {}).get("first_step")
        content["wall_clock"] = {**CLOCK.seconds(), "first_step": first_step}
        content["longest_save_s"] = CLOCK.longest_s("saving")
        replace_text(path, json.dumps(content, indent=2) + "\n")


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: _installed(name) for name in PACKAGES}}


@cache
def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def write_object(path: Path, content: Mapping[str, object]) -> None:
    """Write an object as JSON without secrets. Raises UserError if that fails."""
    plain: JsonObject = Secrets.known().without(content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {reason(error, path.parent)}") from error
