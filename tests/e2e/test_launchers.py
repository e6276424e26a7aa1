"""Other launchers than deepspeed's: srun over two nodes and mpiexec each start one run, not many."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.topology.env import free_port

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.ranks

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=cred_expire=5{socket}
{plugins}
SchedulerParameters=sched_interval=1,batch_sched_delay=0
CompleteWait=0
KillWait=1
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SlurmctldPort={port}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes on this machine; the environment in which its commands work."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munge"))) or os.getuid():
        pytest.skip("Slurm is not installed, or cannot be started")
    socket_of_munge, plugins = (os.environ.get(name, "") for name in ("TEST_MUNGE_SOCKET", "TEST_SLURM_PLUGINS"))
    where = ["-S", socket_of_munge] if socket_of_munge else []  # of a Slurm in a folder of its own
    if subprocess.run(["munge", "-n", *where], capture_output=True, check=False).returncode:
        pytest.skip("munged does not run")
    folder = tmp_path / "slurm"
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir(parents=True)
    ports = {name: free_port() for name in ("port", "port1", "port2")}
    more = {"socket": f",socket={socket_of_munge}" if socket_of_munge else ""}
    more["plugins"] = f"PluginDir={plugins}" if plugins else ""
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=socket.gethostname(), **ports, **more))
    env = {**environment(), "SLURM_CONF": str(folder / "slurm.conf")}
    try:
        stepd = shutil.which("slurmstepd")
        daemon = ["slurmd", *(["-d", stepd] if stepd and plugins else [])]
        for command in (["slurmctld"], [*daemon, "-N", "n1"], [*daemon, "-N", "n2"]):
            subprocess.run(command, env=env, check=True, capture_output=True)
        until = time.monotonic() + 30
        while "idle" not in subprocess.run(["sinfo", "-h"], env=env, capture_output=True, text=True).stdout:
            if time.monotonic() > until:
                pytest.skip("Slurm does not start here")
            time.sleep(0.5)
        yield env
    finally:
        for pid in folder.glob("*.pid"):
            os.kill(int(pid.read_text()), 15)


def environment() -> dict[str, str]:
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launched}
    return {**kept, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(launcher: list[str], folder: Path, env: dict[str, str]) -> None:
    """Two ranks must make one run of two stages, with one line a step."""
    text = folder.with_suffix(".txt")
    text.write_text("The quick brown fox jumps over the lazy dog; 0123456789. " * 60)
    flags = ["--deepspeed_config", "pipeline_checkpointing", "--train_file", text, "--block_size", 32]
    flags += ["--max_steps", 2, "--per_device_train_batch_size", 1, "--output_dir", folder]
    command = [*launcher, sys.executable, "scripts/train.py", *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "run.json").read_text())["layout"]["world_size"] == 2
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_srun_starts_one_run_over_two_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    run(["srun", "-N2", "-n2"], tmp_path / "run", slurm)


TASK = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from harness.data.on_disk.cache import once_per_host
from harness.topology.env import LaunchEnv
from harness.topology.rendezvous import open_store

env = LaunchEnv.from_environ(os.environ)
node = os.environ["SLURM_NODEID"]
store = open_store(env, timedelta(seconds=60))
folder, built = Path(sys.argv[1]), []

def build():
    path = folder / f"built-on-{node}"
    if not path.exists():
        built.append(node)
        path.touch()
    return len(list(folder.glob(path.name)))

assert once_per_host(build, env=env, store=store, host=f"node-{node}", poll_s=0.05) == 1
(folder / f"rank-{env.rank}").write_text(json.dumps([node, env.local_rank, env.local_world_size, built]))
"""


def test_tasks_that_srun_deals_out_know_their_hosts(slurm: dict[str, str], tmp_path: Path) -> None:
    """In blocks, in turn and in planes; one task of each host builds what the others wait for."""
    wanted = {"block": "0011", "cyclic": "0101", "plane=1": "0101"}
    for way, nodes in wanted.items():
        folder = tmp_path / way
        folder.mkdir()
        (tmp_path / "task.py").write_text(TASK)
        command = ["srun", "-N2", "-n4", "-m", way, sys.executable, tmp_path / "task.py", folder]
        environ = {**slurm, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(list(map(str, command)), env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        found = [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(4)]
        assert "".join(node for node, *_ in found) == nodes
        for node in "01":
            here = [row for row in found if row[0] == node]
            assert [(local, size) for _, local, size, _ in here] == [(0, 2), (1, 2)]
            assert [name for *_, built in here for name in built] == [node]


RANK = """
import os, signal, sys, time
from pathlib import Path
from harness.resilience.process import records

folder, job = Path(__file__).parent, int(os.environ.get("SLURM_RESTART_COUNT", 0))
rank, attempt = int(os.environ["RANK"]), int(Path(os.environ["DS_HARNESS_RECORDS"]).name)
records.THIS_RANK.rank = rank
records.expect_success()
records.THIS_RANK.step = 1
records.record_step()
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(138))
if job == 0 and attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
(folder / f"{job}-{attempt}-{rank}").write_text(f"{os.environ['SLURM_NODEID']} {' '.join(sys.argv[2:])}")
time.sleep(60 if job == 0 else 0)
if rank == 0:
    records.record_success()
"""


def test_sbatch_runs_the_supervisor_and_puts_the_job_back_into_the_queue(slurm: dict[str, str], tmp_path: Path) -> None:
    """A rank is killed and started again in the job; then Slurm's signal before the time limit comes."""

    def command(*words: object) -> str:
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait_for(path: Path) -> str:
        until = time.monotonic() + 60
        while not path.exists() or not path.read_text():
            assert time.monotonic() < until, [path, *(log.read_text() for log in tmp_path.glob("slurm-*.out"))]
            time.sleep(0.1)
        return path.read_text()

    (tmp_path / "rank.py").write_text(RANK)
    flags = ["--max_restarts", 2, "--nodes", 2, "--ranks", 1, "--output", "job.sbatch"]
    command("ds-harness", "cluster", "slurm", *flags, "--", tmp_path / "rank.py", "--output_dir", tmp_path / "run")
    job = command("sbatch", "--parsable", f"--export=ALL,PYTHONPATH={ROOT}", "job.sbatch").strip()
    wait_for(tmp_path / "0-1-0")
    resumed = f"--output_dir {tmp_path / 'run'} --resume_from_checkpoint auto"
    assert wait_for(tmp_path / "0-1-1") == f"0 {resumed}"
    command("scancel", "--batch", "--signal=USR1", job)
    assert {wait_for(tmp_path / f"1-0-{rank}").split(maxsplit=1)[1] for rank in range(2)} == {resumed}
    said = (tmp_path / f"slurm-{job}.out").read_text()
    assert "rank 1" in said and "was killed by SIGKILL in step 1" in said and "restart 1 of 2" in said


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="mpiexec.hydra is not installed")
def test_mpiexec_starts_one_run(tmp_path: Path) -> None:
    run(["mpiexec.hydra", "-n", "2"], tmp_path / "hydra", environment())
