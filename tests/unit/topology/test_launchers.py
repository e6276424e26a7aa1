"""What starts processes on hosts: each launcher's variables, as its own documentation or code sets them."""

from __future__ import annotations

import pytest

from harness.errors import UserError
from harness.resilience.options import read_options
from harness.topology.env import LaunchEnv
from harness.topology.launchers import HostAssignment
from tests.unit.topology.test_env import DEEPSPEED, SRUN, place

IN_POD = "KUBERNETES_SERVICE_HOST"
POD = {IN_POD: "10.96.0.1", "JOB_COMPLETION_INDEX": "1"}
TRAIN_JOB = {  # Kubeflow Trainer's torch plugin
    **POD,
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
}
ELASTIC_JOB = {  # the training operator's PyTorchJob with an elastic policy
    **POD,
    "PET_NNODES": "2:4",
    "PET_NPROC_PER_NODE": "auto",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "run-worker-0:23456",
    "PET_MAX_RESTARTS": "3",
}
PYTORCH_JOB = {  # one without, and Volcano's pytorch plugin
    IN_POD: "10.96.0.1",
    "MASTER_ADDR": "run-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "1",
}
JOB_SET = {**POD, "NNODES": "4", "NPROC_PER_NODE": "8", "MASTER_ADDR": "run-workers-0-0.run"}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "4",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n10.0.0.7\n10.0.0.8",
}
DSTACK = {
    "DSTACK_NODE_RANK": "1",
    "DSTACK_NODES_NUM": "4",
    "DSTACK_GPUS_PER_NODE": "8",
    "DSTACK_MASTER_NODE_IP": "10.0.0.5",
}
ONE_TASK = {  # srun -N4 --ntasks-per-node=1
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "n[07-10]",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "7",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        pytest.param(TRAIN_JOB, (1, "4", 8, "run-node-0-0.run:29400"), id="Kubeflow Trainer"),
        pytest.param(ELASTIC_JOB, (None, "2:4", None, "run-worker-0:23456"), id="elastic PyTorchJob"),
        pytest.param(PYTORCH_JOB, (1, "4", None, "run-master-0:23456"), id="PyTorchJob, Volcano"),
        pytest.param(JOB_SET, (1, "4", 8, "run-workers-0-0.run:29500"), id="JobSet"),
        pytest.param(SKYPILOT, (1, "4", 8, "10.0.0.5:29500"), id="SkyPilot"),
        pytest.param(DSTACK, (1, "4", 8, "10.0.0.5:29500"), id="dstack"),
        pytest.param(ONE_TASK, (1, "4", 8, "n07:29500"), id="Slurm, a task on each node"),
    ],
)
def test_a_launch_takes_from_its_launcher_what_was_not_given(
    environ: dict[str, str], found: tuple[int | None, str, int | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostAssignment.from_environ(environ)
    assert host is not None and (host.rank, host.nodes, host.ranks, host.endpoint) == found
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    options = read_options(["train.py"])
    assert (options.node_rank, options.nnodes, options.num_accelerators, options.rdzv_endpoint) == found
    given = read_options(["--rdzv_endpoint", "mine:1", "--nnodes", "2", "train.py"])
    assert (given.rdzv_endpoint, given.nnodes, given.node_rank) == ("mine:1", "2", None)


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="nothing"),
        pytest.param({**SKYPILOT, "SKYPILOT_NUM_NODES": "1"}, id="one host"),
        pytest.param({**TRAIN_JOB, "PET_NNODES": "1"}, id="one pod"),
        pytest.param(POD, id="a pod of an indexed job, whose first pod is not known"),
        pytest.param({**PYTORCH_JOB, "LOCAL_RANK": "0"}, id="a rank of torchrun in a pod"),
        pytest.param({name: value for name, value in PYTORCH_JOB.items() if name != IN_POD}, id="RANK is a rank's"),
        pytest.param(SRUN, id="a task of srun that is a rank"),
    ],
)
def test_a_process_that_is_not_one_of_a_host_each_is_none(environ: dict[str, str]) -> None:
    assert HostAssignment.from_environ(environ) is None


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        pytest.param({**TRAIN_JOB, "PET_NPROC_PER_NODE": "1"}, "run-node-0-0.run", id="Kubeflow Trainer"),
        pytest.param(PYTORCH_JOB, "run-master-0", id="PyTorchJob, Volcano"),
        pytest.param({**JOB_SET, "NPROC_PER_NODE": "1"}, "run-workers-0-0.run", id="JobSet"),
        pytest.param({**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}, "10.0.0.5", id="SkyPilot"),
        pytest.param({**DSTACK, "DSTACK_GPUS_PER_NODE": "1"}, "10.0.0.5", id="dstack"),
        pytest.param(ONE_TASK, "n07", id="Slurm"),
    ],
)
def test_plain_python_on_each_host_is_one_rank_on_each(environ: dict[str, str], address: str) -> None:
    assert place(environ) == (1, 4, 0, 1, address)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TRAIN_JOB, "^Kubeflow or torchrun has started one process on each of 4 hosts, which have 8 ranks: let it"),
        (ELASTIC_JOB, "one process on each of 2:4 hosts, which have several ranks: let it start `ds-harness launch`"),
        ({**DSTACK, "DSTACK_GPUS_PER_NODE": "1", "DSTACK_NODE_RANK": "4"}, "^dstack says that this is host 4 of 4"),
    ],
)
def test_hosts_of_several_ranks_need_a_launch(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LaunchEnv.from_environ(environ)


def test_ranks_that_a_launch_has_started_in_a_pod_are_ranks() -> None:
    assert place({**TRAIN_JOB, **DEEPSPEED}) == place(DEEPSPEED)
    assert place({**SKYPILOT, **DEEPSPEED}) == place(DEEPSPEED)


DEALT_OUT = {  # the node of each of five tasks on two nodes, and its place there
    "block": [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)],
    "cyclic": [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)],
    "plane=2": [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)],
}


@pytest.mark.parametrize("way", DEALT_OUT)
def test_tasks_of_srun_know_their_host_however_they_are_dealt_out(way: str) -> None:
    for rank, (node, local) in enumerate(DEALT_OUT[way]):
        environ = {**SRUN, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        environ |= {"SLURM_STEP_NUM_TASKS": "5", "SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2"}
        assert place(environ) == (rank, 5, local, 3 - node, "n1")
        pmix = {**environ, "PMIX_RANK": str(rank), "PMIX_NAMESPACE": "slurm.pmix.7.0"}
        assert place(pmix) == place(environ)  # srun --mpi=pmix
