"""A rule about files and folders that a config names."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from harness.config.rules.rule import Finding, rule
from harness.config.rules.view import RunView
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
        outside = posixpath.normpath(path).split("/")[0] == ".."
        if outside or posixpath.isabs(path):
            yield Finding(
                pointer=pointer,
                message=f"{name_of(pointer)} is outside of the run's output_dir"
                if outside
                else f"{name_of(pointer)} is absolute, and refused unless it is inside of the run's output_dir",
                hint=f"set {name_of(pointer)} to a relative path",
                severity=None if outside else Severity.WARNING,
                deepspeed="writes there",
                on_value=True,
            )


def _written(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield pointer and path of everything that a run would write by the config."""
    for section in _MONITORS:
        folder, job = (view.get(f"{section}/{name}") for name in ("output_path", "job_name"))
        if view.on(f"{section}/enabled") and (isinstance(folder, str) or isinstance(job, str)):
            parts = [part for part in (folder, job) if isinstance(part, str)]
            yield f"{section}/{'output_path' if isinstance(folder, str) else 'job_name'}", posixpath.join(*parts)
    file = view.get(_PROFILE)
    if isinstance(file, str):
        yield _PROFILE, file
