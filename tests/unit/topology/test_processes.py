"""What the system shows of processes, read for this one, its parent and ones that are gone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from harness.topology.process_status import status_of
from harness.topology.processes import (
    LEVELS,
    above,
    ancestor,
    children_of,
    command_of,
    own_python,
    parent_of,
    wait_readable,
)

GONE = 2**22 + 1  # no system hands out such a number


def test_this_process_runs_and_has_its_parent() -> None:
    own = status_of(os.getpid())
    assert own is not None and own.state in "RS" and own.ending == ""
    assert parent_of(os.getpid()) == os.getppid()
    assert os.getpid() in children_of(os.getppid())


def test_a_parent_was_started_before_its_child() -> None:
    own, parent = status_of(os.getpid()), status_of(os.getppid())
    assert own is not None and parent is not None
    assert 0 < parent.started <= own.started


def test_a_command_line_is_that_of_the_start() -> None:
    assert Path(sys.executable).resolve() == Path(f"/proc/{os.getpid()}/exe").resolve()
    assert "python" in " ".join(command_of(os.getpid()))


def test_a_process_that_is_gone_has_nothing_to_show() -> None:
    assert status_of(GONE) is None
    assert parent_of(GONE) == 0
    assert (children_of(GONE), command_of(GONE)) == ([], ())


def test_the_processes_above_are_told_from_the_nearest_up() -> None:
    told = list(above())
    assert len(told) <= LEVELS
    assert told[:1] == [(os.getppid(), command_of(os.getppid()))] or os.getppid() <= 1
    assert all(parent_of(one) == other for (one, _), (other, _) in pairwise(told))


def test_an_ancestor_is_found_by_a_word_or_by_the_end_of_a_path() -> None:
    for process, words in above():
        if words and words[0]:
            found = ancestor(Path(words[0]).name)
            assert found and process >= 1 and Path(words[0]).name in {Path(word).name for word in command_of(found)}
            break
    assert ancestor("no-launcher-is-called-so") == 0


LARGE = """
import os, sys
held = b"x" * (200 << 20)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
SMALL = """
from harness.topology.processes import peak_resident_bytes
before = peak_resident_bytes()
held = b"x" * (64 << 20)
print(before, peak_resident_bytes())
"""


def test_the_peak_of_a_process_is_not_that_of_the_larger_one_that_started_it() -> None:
    said = subprocess.run([sys.executable, "-c", LARGE, SMALL], capture_output=True, text=True, check=True).stdout
    before, after = map(int, said.split())
    assert 1 << 20 < before < 150 << 20
    assert 60 << 20 < after - before < 80 << 20


def test_a_descriptor_of_a_high_number_is_waited_for():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    source, target = os.pipe()
    high = source if limits[1] <= 1500 else os.dup2(source, 1500)
    try:
        assert wait_readable([high], 0) == []
        os.write(target, b"x")
        assert wait_readable([high, high], 5) == [high]
        os.close(target)
        os.read(high, 1)
        assert wait_readable([high], 5) == [high]  # closed: read() returns at once
        begun = time.monotonic()
        assert wait_readable([], 0.01) == [] and time.monotonic() - begun > 0.009
    finally:
        for descriptor in {high, source}:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_own_python_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    """A model's folder may hold a module named `json`; `-m` and `-c` alone would import it."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    code = {
        flag: subprocess.run([*command, "-c", "import json"], cwd=tmp_path, check=False).returncode
        for flag, command in {"-P": own_python(), "": [sys.executable]}.items()
    }
    assert code == {"-P": 0, "": 9}
