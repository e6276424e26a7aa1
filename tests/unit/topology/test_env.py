"""What the launchers set is read, and what is missing or wrong is named."""

import socket

import pytest

from harness.errors import UserError
from harness.topology.env import LaunchEnv, free_port, inherited, run_timeout
from harness.topology.interfaces import interface_to
from harness.topology.slurm import first_host, tasks_on_node

DEEPSPEED = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_the_deepspeed_launchers_variables_are_read() -> None:
    assert LaunchEnv.from_environ(DEEPSPEED) == LaunchEnv(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="10.0.0.1",
        master_port=29500,
        launched=True,
    )


def test_torchruns_and_open_mpis_names_are_known() -> None:
    torchrun = {**DEEPSPEED, "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "ignored beside torchrun's"}
    assert LaunchEnv.from_environ(torchrun).local_world_size == 2
    mpi = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    read = LaunchEnv.from_environ(mpi)
    assert (read.rank, read.world_size, read.local_rank, read.local_world_size) == (3, 4, 1, 2)


def test_without_a_launcher_a_process_is_alone_and_exports_a_free_port() -> None:
    alone = LaunchEnv.from_environ({"PATH": "/bin", "LOCAL_RANK": "0"})
    assert alone == LaunchEnv() and not alone.launched
    environ: dict[str, str] = {"MASTER_PORT": "1"}
    alone.export(environ)
    assert int(environ["MASTER_PORT"]) > 1
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    with socket.socket() as server:
        server.bind((environ["MASTER_ADDR"], int(environ["MASTER_PORT"])))
    again = LaunchEnv.from_environ(environ)
    assert (again.rank, again.world_size, again.local_rank, again.local_world_size) == (0, 1, 0, 1)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "10.0.0.1"])
def test_ranks_listen_on_the_interface_that_leads_to_rank_0(address: str) -> None:
    environ: dict[str, str] = {}
    LaunchEnv.from_environ({**DEEPSPEED, "MASTER_ADDR": address}).export(environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == ("lo" if address != "10.0.0.1" else interface_to(address, 1))
    chosen = {"GLOO_SOCKET_IFNAME": "lo"}
    LaunchEnv.from_environ({**DEEPSPEED, "MASTER_ADDR": address}).export(chosen)
    assert chosen["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("variable", "value"), [("GLOO_SOCKET_IFNAME", "nosuch7"), ("NCCL_SOCKET_IFNAME", "lo,=nosuch7")]
)
def test_an_interface_that_is_not_there_is_one_line(variable: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"{variable} is {value}, but .* has no such network interface, only .*lo"):
        LaunchEnv.from_environ(DEEPSPEED).export({variable: value})
    LaunchEnv.from_environ(DEEPSPEED).export({"NCCL_SOCKET_IFNAME": "^docker,l,=lo"})


def test_exporting_a_launch_gives_it_back() -> None:
    launch, environ = LaunchEnv.from_environ(DEEPSPEED), {}
    launch.export(environ)
    assert LaunchEnv.from_environ(environ) == launch


SRUN = {  # of rank 3 of `srun -N2 -n4`
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
BATCH = {  # of the script of `sbatch -n4`, which is no task of a step
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SALLOC = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1207@1",
    "PMIX_RANK": "1",
}


def place(environ: dict[str, str]) -> tuple[int, int, int, int, str]:
    read = LaunchEnv.from_environ(environ)
    return read.rank, read.world_size, read.local_rank, read.local_world_size, read.master_addr


def test_a_task_of_srun_knows_its_place_and_the_first_host() -> None:
    assert place(SRUN) == (3, 4, 1, 2, "n1")
    ports = {LaunchEnv.from_environ({**SRUN, "SLURM_PROCID": str(rank)}).master_port for rank in range(4)}
    assert len(ports) == 1
    assert ports != {LaunchEnv.from_environ({**SRUN, "SLURM_STEP_ID": "1"}).master_port}
    given = LaunchEnv.from_environ({**SRUN, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"})
    assert (given.master_addr, given.master_port) == ("10.0.0.9", 1234)
    one_host = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n1"}
    assert place(one_host) == (3, 4, 1, 4, "127.0.0.1")


def test_the_shell_of_a_batch_job_is_no_launch() -> None:
    for environ in (BATCH, SALLOC):
        assert LaunchEnv.from_environ(environ) == LaunchEnv()
        assert LaunchEnv.from_environ({**environ, **DEEPSPEED}) == LaunchEnv.from_environ(DEEPSPEED)
    shell = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}  # srun --pty bash, in it deepspeed
    shell |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS": "4"}
    assert place(shell)[:2] == (0, 1)
    assert place({**shell, **DEEPSPEED}) == place(DEEPSPEED)


def test_launchers_of_mpi_are_read_and_go_before_slurm_that_they_run_under() -> None:
    assert place({**HYDRA, "MASTER_PORT": "1234"}) == (1, 2, 1, 2, "127.0.0.1")
    assert place({**SRUN, **HYDRA, "MASTER_PORT": "1234"})[:2] == (1, 2)
    assert place({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "1.0"}) == place(SRUN)  # srun --mpi=pmi2
    assert place(OPEN_MPI) == (1, 2, 1, 2, "127.0.0.1")
    mvapich = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items() if name.startswith("OMPI")}
    assert place({**mvapich, "MASTER_PORT": "1234"}) == (1, 2, 1, 2, "127.0.0.1")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**HYDRA, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, "^PMI_RANK is set.*MASTER_ADDR and MASTER_PORT"),
        ({"PMI_RANK": "0"}, "^PMI_RANK is set.*set WORLD_SIZE and LOCAL_RANK"),
        ({"PMIX_RANK": "0"}, "^PMIX_RANK is set, but the number of ranks"),
        ({**SRUN, "WORLD_SIZE": "8"}, "^WORLD_SIZE is 8, but SLURM_STEP_NUM_TASKS says 4"),
        ({**SRUN, "SLURM_PROCID": "x"}, "^SLURM_PROCID is 'x'"),
    ],
)
def test_a_launch_that_says_too_little_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LaunchEnv.from_environ(environ)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1", "n1"), ("n[07-09,12],gpu1", "n07"), ("a1,b[2-3]", "a1"), ("r[1-2]n[3-4]", "r1n3"), ("n[2,4]-ib", "n2-ib")],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_the_tasks_on_a_node_of_a_slurm_list() -> None:
    assert [tasks_on_node("2(x2),1,4", node) for node in range(5)] == [2, 2, 1, 4, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"RANK": "8"}, "RANK is 8, outside the 8 ranks"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is 4, outside the 4 ranks"),
        ({"LOCAL_RANK": None, "MASTER_PORT": None}, "^LOCAL_RANK and MASTER_PORT not set"),
        ({"RANK": None}, "^RANK not set"),
    ],
)
def test_what_is_missing_or_wrong_is_named(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**DEEPSPEED, **change}.items() if value is not None}
    with pytest.raises(UserError, match=message):
        LaunchEnv.from_environ(environ)


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("", ""), ("n[07]", "n07"), ("n[1-2,5],m3", "n1"), ("a-b.c[010-012]", "a-b.c010"), ("n1,n2", "n1")],
)
def test_the_first_host_keeps_its_zeros_dots_and_dashes(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("counts", "node", "tasks"), [("", 0, None), ("8", 0, 8), ("8", 1, None), ("1(x3)", 2, 1), ("2,3(x2)", 2, 3)]
)
def test_a_node_outside_of_the_list_has_no_known_tasks(counts: str, node: int, tasks: int | None) -> None:
    assert tasks_on_node(counts, node) == tasks


def test_the_ranks_of_one_launch_find_one_port_and_those_of_another_mostly_another() -> None:
    ports = {LaunchEnv.from_environ({**SRUN, "SLURM_JOB_ID": str(job)}).master_port for job in range(50)}
    assert len(ports) > 45 and all(15000 <= port < 31000 for port in ports)


@pytest.mark.parametrize(("minutes", "wanted"), [(None, 30), ("1", 1), ("600", 600), (" 5 ", 5)])
def test_ranks_wait_as_long_as_the_environment_says(
    minutes: str | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    if minutes is not None:
        monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
    assert run_timeout().total_seconds() == 60 * wanted


@pytest.mark.parametrize(
    ("minutes", "told"),
    [("0", "is 0: give a number of minutes"), ("-3", "is -3: give"), ("1.5", "is '1.5': set a whole")],
)
def test_a_time_to_wait_that_is_none_is_told(minutes: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
    with pytest.raises(UserError, match=f"^DEEPSPEED_TIMEOUT {told}"):
        run_timeout()


def test_what_another_process_inherits_is_chosen_by_how_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABC_ONE", "1")
    monkeypatch.setenv("ABD_TWO", "2")
    assert inherited("ABC_") == {"ABC_ONE": "1"}
    assert inherited("ABC_", "ABD_") == {"ABC_ONE": "1", "ABD_TWO": "2"}
    assert inherited()["ABD_TWO"] == "2"
