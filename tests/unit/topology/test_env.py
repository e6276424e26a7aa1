"""What the launchers set is read, and what is missing or wrong is named."""

import socket

import pytest

from harness.config.errors import UserError
from harness.topology.env import LaunchEnv, free_port

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


@pytest.mark.parametrize(("address", "interface"), [("127.0.0.1", "lo"), ("localhost", "lo"), ("10.0.0.1", None)])
def test_ranks_of_one_host_listen_on_its_loopback_interface(address: str, interface: str | None) -> None:
    environ: dict[str, str] = {}
    LaunchEnv.from_environ({**DEEPSPEED, "MASTER_ADDR": address}).export(environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == interface


def test_exporting_a_launch_gives_it_back() -> None:
    launch, environ = LaunchEnv.from_environ(DEEPSPEED), {}
    launch.export(environ)
    assert LaunchEnv.from_environ(environ) == launch


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
