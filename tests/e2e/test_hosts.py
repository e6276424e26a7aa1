"""Runs across hosts: one is killed, a cable is cut in mid-step, one comes back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.topology.env import free_port
from tests.e2e.hosts import Hosts, missing, some_hosts
from tests.e2e.launching import BIN, ROOT, SCRIPT, environment
from tests.e2e.test_pods import RANK
from tests.support.training import logged

ASKED = "TEST_HOSTS" in os.environ
REASON = missing() if ASKED else "takes two minutes: set TEST_HOSTS=1"
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made")]

STEPS = 400


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with some_hosts(3, tmp_path / "hosts") as made:
        yield made


def start(hosts: Hosts, count: int, run: Path, *flags: object) -> subprocess.Popen[str]:
    """`deepspeed --hostfile` on the first host, for `count` of them; nothing says which interface joins them."""
    variables = hosts.folder / "variables"
    variables.write_text("OMP_NUM_THREADS=1\n")
    command = [BIN / "deepspeed", "--hostfile", hosts.hostfile(), "--num_nodes", count, "--no_ssh_check"]
    command += ["--master_addr", hosts.hosts[0].address, "--master_port", free_port(), SCRIPT]
    command += ["--block_size", 32, "--global_batch_size", 12, "--per_device_train_batch_size", 1]
    command += ["--deepspeed_config", "zero2", "--learning_rate", 1e-3, "--hang_seconds", 4, "--save_steps", 5]
    command += ["--max_steps", STEPS, "--resume_from_checkpoint", "auto", "--output_dir", run, *flags]
    env = environment(**hosts.environment(), DS_ENV_FILE=variables)
    return subprocess.Popen(
        hosts.hosts[0].command(*map(str, command)),
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Wait until a run has made a step."""
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not (rows := logged(run)) or rows[-1]["step"] < step:
        assert process.poll() is None and time.monotonic() < until, process.communicate(timeout=60)[0]
        time.sleep(0.1)


def end(process: subprocess.Popen[str], hosts: Hosts, seconds: float = 60) -> tuple[str, int]:
    """Return what a run says, and its exit code, once nothing of it is left on any host that can be reached."""
    said, _ = process.communicate(timeout=seconds)
    until = time.monotonic() + 30
    while any(host.processes() for host in hosts.hosts if host.sshd.poll() is None) and time.monotonic() < until:
        time.sleep(0.2)
    assert [host.processes() for host in hosts.hosts if host.sshd.poll() is None and host.processes()] == [], said
    return said, process.returncode


def test_hosts_that_are_lost_are_named_and_the_run_goes_on_when_they_are_back(hosts: Hosts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(hosts, 3, run)
    wait_for_step(process, run, 6)
    hosts.hosts[2].kill()
    said, code = end(process, hosts)
    assert code and re.search("error: host host-2 has not answered for .* rank 2 in step", said), said

    process = start(hosts, 2, run)
    first = logged(run)[-1]["step"]
    wait_for_step(process, run, first + 6)
    hosts.hosts[1].cut_cable()
    said, code = end(process, hosts)
    hosts.hosts[1].join_cable()
    assert code and re.search("error: host host-1 has not answered for .* rank 1 in step", said), said

    reached = logged(run)[-1]["step"]
    said, code = end(start(hosts, 2, run, "--max_steps", reached + 3), hosts, 120)
    assert code == 0, said
    assert [row["step"] for row in logged(run)] == list(range(1, reached + 4))
    assert (run / "model.safetensors").exists()


def test_a_launch_by_ssh_goes_on_without_a_host_that_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    """Typed once, on the first of three hosts; ranks of a few lines."""
    (tmp_path / "rank.py").write_text(RANK)

    def wait_for_rank(name: str) -> str:
        until = time.monotonic() + 90
        while not (tmp_path / name).exists() or not (tmp_path / name).read_text():
            assert process.poll() is None and time.monotonic() < until, sorted(each.name for each in tmp_path.iterdir())
            time.sleep(0.1)
        return (tmp_path / name).read_text()

    command = [sys.executable, "-m", "harness.cli", "launch", "--max_restarts", 3, "--hostfile", hosts.hostfile()]
    command += [tmp_path / "rank.py", "--deepspeed_config", "zero2", "--global_batch_size", 12]
    command += ["--per_device_train_batch_size", 1, "--max_steps", 9, "--output_dir", tmp_path / "run"]
    process = subprocess.Popen(
        hosts.hosts[0].command(*map(str, command)),
        env=environment(**hosts.environment()),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert wait_for_rank("0-2-of-3").split()[1] == hosts.hosts[0].address
    hosts.hosts[2].kill()
    wait_for_rank("1-1-of-2")
    (tmp_path / "end").touch()
    said, code = end(process, hosts)
    assert code == 0 and "no answer from" in said and "done, after 1 restart" in said, said
