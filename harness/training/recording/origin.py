"""Where a run comes from: command, data files, tokenizer, date, git state and hosts, for `run.json`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from harness.arguments.themes.script import PYTHON_STDLIB
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import masked_by_name
from harness.data.files.sources import TOKENS, find_files, find_tokens, source_groups
from harness.data.preview import composition
from harness.errors import UserError
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
