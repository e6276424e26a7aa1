"""The batch file for Slurm: what it asks for, what is refused, and what its shell does when Slurm signals it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.resilience.launch import write_batch
from harness.resilience.options import read_options

SCRIPT = ["scripts/train.py", "--output_dir", "a run"]


def batch(folder: Path, *flags: str, script: list[str] = SCRIPT) -> str:
    """Return the text of the file that these flags give."""
    argv = ["--slurm", str(folder / "job.sbatch"), *flags, *script]
    path = write_batch(read_options(argv))
    assert path == str(folder / "job.sbatch")
    return Path(path).read_text()


def asked(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")}


def test_it_asks_for_the_hosts_and_starts_the_same_command_from_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # Slurm cannot be asked for GPUs
    flags = ["--slurm_seconds", "300", "--num_nodes", "3", "--num_accelerators", "8", "--max_restarts", "2"]
    text = batch(tmp_path, *flags)
    assert {"nodes=3", "ntasks-per-node=8", "gpus-per-node=8", "requeue", "signal=B:USR1@300"} <= asked(text)
    assert f"\ncd {shlex.quote(str(tmp_path))}\n" in text
    (command,) = [line for line in text.splitlines() if line.endswith(" &") and "launch" in line]
    words = shlex.split(command.removesuffix(" &"))
    assert words[1:] == ["launch", *flags[2:], *SCRIPT, "--resume_from_checkpoint", "auto"]
    assert words[0] == str(Path(sys.executable).with_name("ds-harness"))


def test_jobs_on_a_cluster_without_gpus_ask_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho '(null)'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not any("gpus" in each for each in asked(batch(tmp_path, "--num_accelerators", "2")))
    sinfo.write_text("#!/bin/sh\necho 'gpu:a100:8(S:0)'\n")
    assert "gpus-per-node=2" in asked(batch(tmp_path, "--num_accelerators", "2"))


@pytest.mark.parametrize(
    ("flags", "script", "said"),
    [
        ((), SCRIPT, "--slurm: give --num_accelerators"),
        (("--include", "a:0"), SCRIPT, "--slurm: Slurm chooses the hosts"),
        (("--num_accelerators", "1"), [*SCRIPT, "--resume_from_checkpoint=x"], "leave out --resume_from_checkpoint"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    flags: tuple[str, ...], script: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        batch(tmp_path, *flags, script=script)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "job.sbatch").exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no-folder/job\.sbatch: cannot be written: No such file"):
        batch(tmp_path / "no-folder", "--num_accelerators", "1")


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
    text = batch(tmp_path, "--num_accelerators", "1")
    for name, content in (("supervisor", SUPERVISOR.replace("{code}", str(code))), ("scontrol", "echo $@ >> queue\n")):
        (tmp_path / name).write_text(content if content.startswith("#!") else f"#!/bin/sh\n{content}")
        (tmp_path / name).chmod(0o755)
    program = shlex.quote(str(Path(sys.executable).with_name("ds-harness")))
    job = tmp_path / "job.sbatch"
    text = text.replace(f"{program} launch", shlex.quote(str(tmp_path / "supervisor")))
    assert text.count("\nwait $supervisor\n") == 1
    job.write_text(text.replace("\nwait $supervisor\n", "\ntouch waits\nwait $supervisor\n"))  # its traps are set
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
