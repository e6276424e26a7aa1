"""Write `run.json`, and other objects as JSON without secrets."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.atomic import replace_text
from harness.checkpoint.directories import RUN
from harness.config.values.json_file import read_object
from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup
from harness.config.values.secrets import Secrets
from harness.errors import UserError, reason
from harness.resilience.process.activity import CLOCK

PACKAGES = ("ds-harness", "deepspeed", "torch", "transformers", "datasets")


def write_run(output_dir: Path, content: JsonObject) -> None:
    """Write `run.json`: `content` without secrets, and package versions. Raises OSError if that fails."""
    content = {**Secrets.known(content).without(content), "versions": versions()}
    replace_text(output_dir / RUN, json.dumps(content, indent=2, default=str) + "\n")


def note_wall_clock(output_dir: Path, first_step: float | None = None) -> None:
    """Add to `run.json` how this process spent its time, in seconds; without `first_step`, keep the old value."""
    path = output_dir / RUN
    # A full disk or a replaced file is not worth an error at the end of a run.
    with suppress(OSError, ValueError):
        content = read_object(path)
        earlier = lookup(content, "/wall_clock/first_step")
        content["wall_clock"] = {**CLOCK.seconds(), "first_step": first_step or earlier}
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
