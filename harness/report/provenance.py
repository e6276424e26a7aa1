"""Where a run comes from: command, code, hosts, data, certificate."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import masked_by_name
from harness.report.certificate import of_run
from harness.topology.env import inherited
from harness.training.prepare.run import Run
from harness.training.recording.files import versions

# What git may run by a checkout's own config: a monitor of files, hooks (one when it writes the index), filters when it
# compares contents, programs of a remote when it fetches missing objects.
WITHOUT_PROGRAMS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
PROGRAMS = r"filter\..*\.(clean|process)|extensions\.partialclone|remote\..*\.promisor"
PROGRAM = re.compile(rf"(local|worktree)\s+({PROGRAMS})\b")


def provenance(run: Run, hosts: Sequence[str]) -> JsonObject:
    """Return what `run.json` says of a run's origin.

    That is its command, date, git state, the host of each rank, data, tokenizer, and the certificate of
    `ds-harness verify`.
    """
    tokenizer = run.data.tokenizer
    part = run.spec.parts.data
    files, composition = (
        ({}, {}) if part is None else (part.data_files(run.spec.inputs.flags), part.composition(run.data.train))
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
        "certificate": _certificate(run),
    }


def _certificate(run: Run) -> JsonObject | None:
    if run.trainable.causal is None:
        return None
    return of_run(run.spec.config.document.data, run.spec.resolved, run.trainable.shaping_config, versions())


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
