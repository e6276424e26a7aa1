"""A rule about files and folders that a config names."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.pointers import name_of

_MONITORS = ("/tensorboard", "/csv_monitor")
_PROFILE = "/flops_profiler/output_file"


@rule("DS111", "path-outside-of-the-run", Severity.ERROR, claim="runs")
def path_outside_of_the_run(view: RunView) -> Iterator[Finding]:
    """A monitor or the profiler would write outside of the run's output_dir.

    A config may come from somebody else, so a run of the harness writes only below its output_dir: relative paths start
    there, and other paths are refused. An absolute path may lie inside, which `check` cannot know: it warns.

    Wrong: {"train_batch_size": 8, "flops_profiler": {"enabled": true, "output_file": "../profile.txt"}}
    Right: {"train_batch_size": 8, "flops_profiler": {"enabled": true, "output_file": "profile.txt"}}
    """
    for pointer, path in _written(view) if view.target == "harness" else ():
        is_absolute = posixpath.isabs(path)
        name = name_of(pointer)
        if _leaves(path):
            yield Finding(
                pointer=pointer,
                message=f"{name} is absolute, and refused unless it is inside of the run's output_dir"
                if is_absolute
                else f"{name} is outside of the run's output_dir",
                hint=f"set {name} to a relative path",
                severity=Severity.WARNING if is_absolute else None,
                deepspeed="writes there",
                on_value=True,
            )


def _leaves(path: str) -> bool:
    """Return whether a path leads out of the folder that it is relative to."""
    return posixpath.isabs(path) or posixpath.normpath(path).split("/")[0] == ".."


def _written(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield everything that a run would write by the config: the pointer of the key that decides, and the path.

    A monitor writes to `job_name` in `output_path`; the one that leads outside decides.
    """
    for section in _MONITORS:
        folder, job = (_text(view, f"{section}/{name}") for name in ("output_path", "job_name"))
        by_job = posixpath.isabs(job) or not _leaves(folder)
        if view.on(f"{section}/enabled"):
            yield f"{section}/{'job_name' if by_job else 'output_path'}", posixpath.join(folder, job)
    if file := _text(view, _PROFILE):
        yield _PROFILE, file


def _text(view: RunView, pointer: str) -> str:
    value = view.get(pointer)
    return value if isinstance(value, str) else ""
