"""Ranks meet in a store that only the run's own host, or nobody at all, can reach."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from harness.errors import UserError
from harness.topology.env import LOOPBACK, LaunchEnv, free_port
from harness.topology.rendezvous import open_store

TIMEOUT = timedelta(seconds=20)
OTHER_LOOPBACK = "127.0.0.2"  # a second address of this host


def two_ranks(port: int) -> list[LaunchEnv]:
    return [
        LaunchEnv(rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_port=port) for rank in (0, 1)
    ]


def test_one_process_opens_no_port() -> None:
    assert isinstance(open_store(LaunchEnv(), TIMEOUT), dist.HashStore)


def test_rank_0_listens_on_the_masters_address_alone() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda env: open_store(env, TIMEOUT), two_ranks(port))
    assert first is not None and second is not None
    first.set("greeting", "hello")
    assert second.get("greeting") == b"hello"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((OTHER_LOOPBACK, port), timeout=5)


def test_a_taken_port_is_one_line_that_says_how_to_choose_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = two_ranks(taken.getsockname()[1])[0]
        with pytest.raises(
            UserError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use; .*master_port"
        ):
            open_store(env, TIMEOUT)


def test_a_host_without_an_address_is_named() -> None:
    env = LaunchEnv(world_size=2, master_addr="no-such-host.invalid", master_port=1)
    with pytest.raises(UserError, match=r"MASTER_ADDR no-such-host\.invalid: no such host"):
        open_store(env, TIMEOUT)


def test_torchruns_own_store_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dist.TCPStore(LOOPBACK, 0, is_master=True)
    place = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(own.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    open_store(LaunchEnv(world_size=2, has_store=True), TIMEOUT).set("said", "by a rank")
    assert own.get("default_pg/said") == b"by a rank"
