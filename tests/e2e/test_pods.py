"""Hosts that start their own part of a run and meet, as pods do: no ssh. One is killed, cut off, comes back, stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from harness.cluster.commands import cluster
from tests.e2e.hosts import Host, Hosts, missing, some_hosts
from tests.e2e.launching import ROOT, environment

REASON = missing(ssh=False)
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made")]

# A rank of a few lines, which knows its step and saves on a signal: what makes a real rank slow to start is left out.
RANK = """
import os, signal, sys, time
from pathlib import Path
from harness.resilience.process import records

rank, start = int(os.environ["RANK"]), int(Path(os.environ["DS_HARNESS_RECORDS"]).name)
folder, world = Path(__file__).parent, os.environ["WORLD_SIZE"]
records.THIS_RANK.rank, records.THIS_RANK.stage = rank, 0
records.expect_success()
stopped = []
signal.signal(signal.SIGUSR1, lambda number, _: stopped.append(number))
signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
step = 0
while not (folder / "end").exists() and step < 600:
    step += 1
    records.THIS_RANK.step = step
    records.record_step()
    (folder / f"{start}-{rank}-of-{world}").write_text(f"{os.getpid()} {os.environ['MASTER_ADDR']}")
    if stopped or (folder / "stop").exists():
        number = (stopped or [signal.SIGTERM])[0]
        error = type("Stopped", (Exception,), {})(128 + number)
        records.record_failure(error)
        sys.exit(128 + number)
    time.sleep(0.1)
if rank == 0:
    records.record_success()
"""


class Run:
    """A run of some hosts, of which each has its own `ds-harness launch`."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.launches: dict[int, subprocess.Popen[str]] = {}
        (folder / "rank.py").write_text(RANK)

    def launch(self, index: int, *flags: object) -> subprocess.Popen[str]:
        host = self.hosts.hosts[index]
        meeting = ["--rdzv_endpoint", f"{self.hosts.hosts[0].address}:29400", "--nproc_per_node", 1]
        command = [sys.executable, "-m", "harness.cli", "launch", *meeting, *flags, self.folder / "rank.py"]
        batch = ["--global_batch_size", 12, "--per_device_train_batch_size", 1]  # for one rank, two and three
        command += ["--deepspeed_config", "zero2", "--max_steps", 9, *batch, "--output_dir", self.folder / "run"]
        self.launches[index] = subprocess.Popen(
            host.command(*map(str, command)),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.launches[index]

    def rank(self, name: str, seconds: float = 60) -> tuple[int, str]:
        """The process of a rank by start, rank and world, and the address where the ranks meet, once it runs."""
        path, until = self.folder / name, time.monotonic() + seconds
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < until, [name, *(each.name for each in self.folder.iterdir())]
            time.sleep(0.05)
        process, address = path.read_text().split()
        return int(process), address

    def end(self, index: int, seconds: float = 60) -> tuple[int, str]:
        process = self.launches.pop(index)
        said, _ = process.communicate(timeout=seconds)
        return process.returncode, said


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with some_hosts(3, tmp_path_factory.mktemp("pods"), ssh=False) as made:
        yield made


@pytest.fixture
def run(hosts: Hosts, tmp_path: Path) -> Iterator[Run]:
    made = Run(hosts, tmp_path)
    yield made
    for process in made.launches.values():
        process.kill()
        process.wait()
    until = time.monotonic() + 90
    while any(map(Host.processes, hosts.hosts)):  # keepers end what killed launches have left
        assert time.monotonic() < until, [host.processes() for host in hosts.hosts]
        time.sleep(0.1)


@pytest.mark.skipif("TEST_HOSTS" not in os.environ, reason="takes two minutes: set TEST_HOSTS=1")
def test_lost_ranks_hosts_and_cables_end_no_run(run: Run) -> None:
    flags = ("--nnodes", "1:3", "--max_restarts", 5)
    for index in range(3):
        run.launch(index, *flags)
    process, address = run.rank("0-1-of-3")
    assert address == run.hosts.hosts[0].address

    os.kill(process, signal.SIGKILL)  # a rank
    assert run.rank("1-2-of-3")[1] == run.hosts.hosts[0].address

    run.launches.pop(2).kill()  # a launch, and all that it has started
    run.rank("2-1-of-2")

    run.hosts.hosts[1].cut_cable()
    run.rank("3-0-of-1", 90)
    run.hosts.hosts[1].join_cable()
    run.launch(2, *flags)  # a host that is back, after it was repaired
    _wait_for_three(run)
    (run.folder / "end").touch()
    ends = [run.end(index) for index in range(3)]
    said = ends[0][1]
    assert [code for code, _ in ends] == [0, 0, 0], said
    assert "rank 1 (host-1, stage 0) was killed by SIGKILL in step" in said
    assert "no answer from the agent on host-2" in said and "no answer from the agent on host-1" in said
    assert "a host is back: going on with all hosts that answer" in said


def _wait_for_three(run: Run) -> None:
    """Wait for a start on all hosts again: the two may come back in one start or in two."""
    until = time.monotonic() + 120
    while not any((run.folder / f"{start}-2-of-3").exists() for start in (4, 5, 6)):
        assert time.monotonic() < until, sorted(each.name for each in run.folder.iterdir())
        time.sleep(0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("resource", ["TrainJob", "JobSet"])
def test_pods_run_what_the_written_job_says(run: Run, resource: str, tmp_path: Path) -> None:
    """With the variables that Kubeflow's controller, or Kubernetes, sets; the first pod's name is its address here.

    A pod of the JobSet is evicted, and the run goes on without it.
    """
    job, script = tmp_path / "job.yaml", [str(run.folder / "rank.py"), "--output_dir", str(tmp_path / "run")]
    script += ["--deepspeed_config", "zero2", "--max_steps", "9"]
    fewest = ["--min_nodes", "1"] if resource == "JobSet" else []
    words = ["kubernetes", "--resource", resource, "--nodes", "2", *fewest, "--ranks", "1", "--output", str(job)]
    words += ["--volume", "runs", "--mount", str(tmp_path)]
    assert cluster([*words, "--", *script]) == 0
    (*_, document) = yaml.safe_load_all(job.read_text())
    address = run.hosts.hosts[0].address
    if resource == "TrainJob":
        trainer = document["spec"]["trainer"]
        command = trainer["command"]
        variables = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": trainer["numProcPerNode"]}
        variables |= {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": 29400}
        index = "PET_NODE_RANK"
    else:
        (pods,) = document["spec"]["replicatedJobs"]
        (container,) = pods["template"]["spec"]["template"]["spec"]["containers"]
        command = container["command"]
        variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        variables["MASTER_ADDR"] = address
        index = "JOB_COMPLETION_INDEX"
    for number in range(2):
        env = environment(KUBERNETES_SERVICE_HOST="10.96.0.1", **variables, **{index: number})
        inside = run.hosts.hosts[number].command(sys.executable, "-m", "harness.cli", *command[1:])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        run.launches[number] = subprocess.Popen(inside, cwd=ROOT, env=env, **pipes)
    assert run.rank("0-0-of-2")[1] == run.rank("0-1-of-2")[1] == address
    if resource == "JobSet":
        run.launches[1].send_signal(signal.SIGTERM)
        (run.folder / "stop").touch()  # the ranks of a real run agree to stop
        code, said = run.end(1)
        assert code == 128 + signal.SIGTERM, said
        (run.folder / "stop").unlink()
        run.rank("1-0-of-1")
    (run.folder / "end").touch()
    ends = [run.end(number) for number in run.launches.copy()]
    assert {code for code, _ in ends} == {0}, ends
    assert resource == "TrainJob" or "going on without host-1, which was told to stop" in ends[0][1]
