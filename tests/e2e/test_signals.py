"""Signals to a run of several ranks under the deepspeed launcher: all ranks save at one step and end, none is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.resilience.on_host.standby import TITLE, WITHOUT_DRIVER
from harness.topology.processes import children_of, command_of
from tests.e2e.launching import ROOT, deepspeed, environment

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]


class Run:
    """A run of two stages that would go on for ever, which has made its first steps."""

    def __init__(self, command: list[str], folder: Path, steps: int) -> None:
        self.folder, self.said = folder, folder.with_suffix(".out")
        with self.said.open("w") as out:
            self.launcher = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=not_ignoring,
            )
        until = time.monotonic() + 120
        while self.steps() < steps:
            assert self.launcher.poll() is None and time.monotonic() < until, self.said.read_text()
            time.sleep(0.2)

    def steps(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def processes(self) -> str:
        listing = subprocess.run(["ps", "-wweo", "stat,args"], capture_output=True, text=True, check=True).stdout
        return "\n".join(line for line in listing.splitlines() if str(self.folder) in line and line[0] != "Z")

    def rank(self, number: int) -> int:
        listing = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True).stdout
        ours = [line for line in listing.splitlines() if str(self.folder) in line and f"--local_rank={number}" in line]
        return int(ours[0].split()[0])

    def has_standby(self) -> bool:
        """Whether a process stands by for the next restart."""
        return any(command_of(process)[:1] == (TITLE,) for process in children_of(self.launcher.pid))

    def end(self) -> int:
        """The launcher's exit code; returns when no process of the run is left."""
        code = self.launcher.wait(timeout=60)
        until = time.monotonic() + 60
        while self.processes():
            assert time.monotonic() < until, self.processes()
            time.sleep(0.2)
        return code

    def saved_once(self) -> bool:
        saved = [path.name for path in self.folder.glob("*checkpoint-*")]
        return saved == [f"checkpoint-{self.steps()}"]


def wait_until(run: Run, is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not is_true():
        assert run.launcher.poll() is None and time.monotonic() < until, run.said.read_text()
        time.sleep(0.1)


def not_ignoring() -> None:
    """Undo what `nohup` and a shell's `&` set, which a run respects."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def command(text: Path, folder: Path) -> list[str]:
    flags = ["--deepspeed_config", "pipeline_checkpointing", "--train_file", text, "--block_size", 32]
    flags += ["--max_steps", 100000, "--per_device_train_batch_size", 1, "--output_dir", folder]
    return [*deepspeed(2), "scripts/train.py", *map(str, flags)]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of which the `deepspeed` process alone was signalled."""
    place = tmp_path_factory.mktemp("signals")
    text, folder = place / "fox.txt", place / "run"
    text.write_text("The quick brown fox jumps over the lazy dog; 0123456789. " * 60)
    run = Run(command(text, folder), folder, steps=1)
    run.launcher.send_signal(signal.SIGINT)
    assert run.end() == -signal.SIGINT
    return run


def test_a_run_saves_and_stops_when_its_launcher_is_signalled(stopped: Run) -> None:
    assert stopped.saved_once()
    said = stopped.said.read_text()
    assert f"SIGTERM: saved and stopped after step {stopped.steps()}" in said
    assert said.count("Traceback") == 1  # of the launcher
    assert "\ngo on with: " in said


def test_it_goes_on_by_the_command_that_it_said_also_after_a_kill_and_stops_at_ctrl_c(stopped: Run) -> None:
    folder, begun = stopped.folder, stopped.steps()
    lines = stopped.said.read_text().splitlines()
    goes_on = next(line for line in lines if line.startswith("go on with: "))
    words = shlex.split(goes_on.removeprefix("go on with: "))
    words[:1] = ["ds-harness", "launch", "--max_restarts", "1"]
    again = Run([*words, "--save_total_limit", "1"], folder, steps=begun + 1)
    wait_until(again, again.has_standby)  # for a restart that need not import
    os.kill(again.rank(1), signal.SIGKILL)
    wait_until(again, lambda: again.said.read_text().count("resumed from") == 2)
    resumed = time.time()
    started_with = Path(f"/proc/{again.rank(1)}/environ").read_text()
    assert all(f"{name}={value}" in started_with for name, value in WITHOUT_DRIVER.items())  # forked from it
    wait_until(again, lambda: again.steps() > begun and (folder / "metrics.jsonl").stat().st_mtime > resumed)
    assert re.search(r"rank 1 \(.*, stage 1\) was killed by SIGKILL in step \d+", again.said.read_text())
    os.killpg(again.launcher.pid, signal.SIGINT)  # as Ctrl-C
    assert again.end() == 128 + signal.SIGINT
    assert again.said.read_text().count(f"go on with: {shlex.join(words[:9])}") == 1
    assert f"resumed from {folder}/checkpoint-{begun} at step {begun}" in again.said.read_text()
    assert again.saved_once() and "Traceback" not in again.said.read_text()
    rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, len(rows) + 1))
