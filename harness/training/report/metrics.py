"""What a run leaves to be read: `metrics.jsonl`, one object a step, and `run.json`, what was run."""

from __future__ import annotations

import itertools
import json
import os
import platform
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

from harness.checkpoint.atomic import replace_text
from harness.checkpoint.directories import RUN
from harness.config.values.json_object import JsonObject
from harness.training.callbacks import StepRecord

PACKAGES = ("ds-harness", "deepspeed", "torch", "transformers", "datasets")


class MetricsFile:
    """Appends objects to a file, one a line; a resumed run drops those of the steps after its checkpoint first."""

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        self._file = _cut(path, first_step)

    def write(self, record: StepRecord | JsonObject) -> None:
        """Append one object and hand it to the operating system, so that a killed run keeps it."""
        self._do(self._reopen)
        content = record.as_dict() if isinstance(record, StepRecord) else record
        self._file.write(json.dumps(_finite(content)) + "\n")
        self._do(self._file.flush)

    def rewind(self, step: int) -> None:
        """Drop the steps after `step`."""
        self.close()
        self._do(lambda: setattr(self, "_file", _cut(self._path, step + 1)))

    def close(self) -> None:
        """Close the file."""
        self._do(self._file.close)

    def _reopen(self) -> None:
        """Go on in a new file if somebody has removed this one, or its folder."""
        with suppress(FileNotFoundError):
            if not self._file.closed and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        gone, self._file = self._file, self._path.open("a", encoding="utf-8")
        gone.close()
        warnings.warn(f"{self._path}: it was removed; metrics go on in a new file", stacklevel=4)

    def _do(self, action: Callable[[], None]) -> None:
        """Write what is waiting. Where that fails, as on a full disk, training is worth more than its metrics."""
        try:
            action()
        except OSError as error:  # the lines wait in memory, for the next one
            warnings.warn(f"{self._path}: cannot be written: {error.strerror}; training continues", stacklevel=3)


def set_aside(path: Path) -> Path | None:
    """Give an earlier run's file a name that is free, as `metrics.1.jsonl`; returns it, None where there is none."""
    if not path.is_file() or not path.stat().st_size:
        return None
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def write_run(output_dir: Path, content: JsonObject) -> None:
    """Write `run.json`: what is given, and the versions it ran with."""
    content = {**content, "versions": versions()}
    replace_text(output_dir / RUN, json.dumps(content, indent=2, default=str) + "\n")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide about a run."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cut(path: Path, first_step: int) -> TextIO:
    """Open a file to append to it, without the lines of `first_step` and later ones."""
    kept = _steps_before(path, first_step) if path.is_file() else []
    replace_text(path, "".join(line + "\n" for line in kept))
    return path.open("a", encoding="utf-8")


def _steps_before(path: Path, first_step: int) -> list[str]:
    """Return the whole lines of steps before `first_step`; a line that was cut off in the middle is left out."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] < first_step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    return kept


def _finite(content: JsonObject) -> JsonObject:
    """JSON has no NaN and no infinity: null stands for them."""
    return {
        key: None if isinstance(value, float) and not abs(value) < float("inf") else value
        for key, value in content.items()
    }
