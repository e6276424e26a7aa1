"""The batch file for Slurm: what it asks for, what is refused, and what its shell does when Slurm signals it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cli import main

SCRIPT = ["harness.train", "--output_dir", "a run"]


def batch(folder: Path, *flags: str, script: list[str] = SCRIPT) -> str:
    """Return the text of the file that these flags give."""
    path = folder / "job.sbatch"
    assert main(["cluster", "slurm", *flags, "--output", str(path), "--", *script]) == 0
    return path.read_text()


def asked(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")}


def test_it_asks_for_the_hosts_and_starts_the_same_command_from_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = batch(tmp_path, "--save_seconds", "120", "--nodes", "3", "--min_nodes", "2", "--gpus", "8")
    assert {"nodes=3", "ntasks-per-node=1", "gpus-per-node=8", "requeue", "signal=B:USR1@300"} <= asked(text)
    assert f"\ncd {shlex.quote(str(tmp_path))}\n" in text
    (command,) = [line for line in text.splitlines() if line.endswith(" &") and " launch " in line]
    words = shlex.split(command.removesuffix(" &"))
    flags = ["--max_restarts", "20", "--num_nodes", "3", "--nproc_per_node", "8", "--min_ranks", "16"]
    assert words[1:] == ["launch", *flags, *SCRIPT, "--resume_from_checkpoint", "auto"]
    assert words[0] == str(Path(sys.executable).with_name("ds-harness"))


def test_jobs_on_a_cluster_without_gpus_ask_for_processors(tmp_path: Path) -> None:
    found = asked(batch(tmp_path, "--ranks", "2"))
    assert "cpus-per-task=2" in found and not any("gpus" in each for each in found)


@pytest.mark.parametrize(
    ("flags", "script", "said"),
    [
        ((), ["nosuch.py"], "nosuch.py: no such file"),
        ((), [*SCRIPT, "--deepspeed_config", "nosuch"], "DS001 no such file or preset"),
        ((), [*SCRIPT, "--train_file", "nosuch.jsonl"], "nosuch.jsonl"),
        ((), [*SCRIPT, "--deepspeed_config", "pipeline_3d"], "DS311 2 ranks cannot be divided"),
        (("--nodes", "3"), [*SCRIPT, "--deepspeed_config", "pipeline_3d"], "DS311 6 ranks cannot be divided"),
        (("--memory", "900Gi"), SCRIPT, "--memory is for kubernetes"),
    ],
)
def test_a_job_that_would_fail_is_not_written(
    flags: tuple[str, ...], script: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.sbatch"
    try:
        assert main(["cluster", "slurm", "--ranks", "2", *flags, "--output", str(path), "--", *script]) == 1
    except SystemExit as end:
        assert end.code == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1 and not path.exists()


SUPERVISOR = """#!/bin/sh
trap 'echo USR1 >> said; exit {code}' USR1
trap 'echo TERM >> said; exit 143' TERM
echo started >> said
while :; do sleep 0.02; done
"""


@pytest.mark.parametrize(
    ("signal", "code", "requeued"),
    [("USR1", 138, True), ("USR1", 0, False), ("TERM", 143, False)],
    ids=["saved", "done by then", "cancelled"],
)
def test_the_shell_passes_signals_on_and_puts_back_what_was_saved(
    signal: str, code: int, requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is a shell script in the place of `ds-harness`, and so is `scontrol`."""
    monkeypatch.chdir(tmp_path)
    text = batch(tmp_path, "--ranks", "1")
    for name, content in (("supervisor", SUPERVISOR.replace("{code}", str(code))), ("scontrol", "echo $@ >> queue\n")):
        (tmp_path / name).write_text(content if content.startswith("#!") else f"#!/bin/sh\n{content}")
        (tmp_path / name).chmod(0o755)
    program = shlex.quote(str(Path(sys.executable).with_name("ds-harness")))
    job = tmp_path / "job.sbatch"
    text = text.replace(f"{program} launch", shlex.quote(str(tmp_path / "supervisor")))
    assert text.count("\nwait $launch\n") == 1
    job.write_text(text.replace("\nwait $launch\n", "\ntouch waits\nwait $launch\n"))  # its traps are set
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    shell = subprocess.Popen(["bash", job], env=environment)
    until = time.monotonic() + 30
    while not all((tmp_path / name).exists() for name in ("said", "waits")):
        assert shell.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    subprocess.run(["kill", f"-{signal}", str(shell.pid)], check=True)
    assert shell.wait(timeout=30) == code
    assert (tmp_path / "said").read_text().split() == ["started", signal]
    queue = tmp_path / "queue"
    assert (queue.read_text().split() if queue.exists() else []) == (["requeue", "77"] if requeued else [])
