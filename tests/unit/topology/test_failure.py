"""A rank that fails before the ranks meet: who shows the error, who is told, and who is not waited for."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from harness.errors import NotMet
from harness.topology import failure, peers, rendezvous
from harness.topology.env import LaunchEnv, free_port
from harness.topology.failure import show_and_tell
from harness.topology.peers import may_come
from harness.topology.rendezvous import open_store, require_one_kind

TIMEOUT = timedelta(seconds=20)


def ranks(size: int) -> list[LaunchEnv]:
    port = free_port()
    return [
        LaunchEnv(rank=rank, world_size=size, local_rank=rank, local_world_size=size, master_port=port)
        for rank in range(size)
    ]


def shown(errors: list[str | None], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Let ranks fail with these errors, or meet where there is none; return what is shown, and what those raise."""

    def opened_late_by_rank_0(env: LaunchEnv, timeout: timedelta, *, waits: bool) -> dist.Store:
        store = open_store(env, timeout, waits=waits)
        if env.rank == 0:
            time.sleep(0.3)  # until the others have written into it
        return store

    monkeypatch.setattr(failure, "HEARING_S", 1.0)
    monkeypatch.setattr(rendezvous, "open_store", opened_late_by_rank_0)
    monkeypatch.setattr(rendezvous, "READING_S", 2.0)
    lines: list[str] = []

    def start(env: LaunchEnv) -> None:
        what = errors[env.rank]
        if what is None:
            require_one_kind(open_store(env, TIMEOUT), env, "cpu")
        else:
            show_and_tell(env, what, lambda: lines.append(f"{env.rank}: {what}"))

    with ThreadPoolExecutor(len(errors)) as pool:
        ends = [pool.submit(start, env) for env in ranks(len(errors))]
        raised = [end.exception(timeout=20) for end in ends]
    assert all(isinstance(error, NotMet) == (what is None) for what, error in zip(errors, raised, strict=True)), raised
    return sorted(lines), [str(error) for error in raised if error is not None]


@pytest.mark.parametrize(
    ("errors", "lines"),
    [
        pytest.param(["no file a", "no file a", "no file a"], ["0: no file a"], id="all-alike"),
        pytest.param(["no file a", "no file b", "no file a"], ["0: no file a", "1: no file b"], id="one-unlike"),
        pytest.param([None, "no file a", "no file a"], ["1: no file a"], id="all-but-the-first"),
    ],
)
def test_the_same_error_is_shown_once(
    errors: list[str | None], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    got, _ = shown(errors, monkeypatch)
    if errors[0] is None:
        got = [line.replace("2: ", "1: ") for line in got]  # whichever came first
    assert got == lines


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_ranks_that_wait_for_one_that_has_failed_are_told_why(failed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    what = "the row is broken"
    lines, told = shown([what if rank == failed else None for rank in range(3)], monkeypatch)
    assert lines == [f"{failed}: {what}"]
    assert len(told) == 2 and len(set(told)) == 1
    assert told[0].startswith(f"rank {failed} (host ") and told[0].endswith(f"has failed before the ranks met: {what}")


@contextmanager
def process_of(env: LaunchEnv) -> Iterator[None]:
    """A process that was started as this rank."""
    place = {"RANK": env.rank, "WORLD_SIZE": env.world_size, "MASTER_ADDR": env.master_addr}
    own = {**os.environ, **{name: str(value) for name, value in place.items()}, "MASTER_PORT": str(env.master_port)}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=own, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_waits_for_ranks_of_its_host_only_while_they_run(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = ranks(3)
    own = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(envs[0].master_port)}
    read = peers.started_with
    monkeypatch.setattr(peers, "started_with", lambda one: own if one == os.getpid() else read(one))
    began = time.monotonic()
    assert not may_come(envs[rank]) and failure.tell(envs[rank], "no file a") is None
    assert time.monotonic() - began < 5
    with process_of(ranks(3)[1 - rank]), process_of(envs[rank]):
        assert not may_come(envs[rank])  # those are of another launch, and this rank's own
        with process_of(envs[2]):
            assert may_come(envs[rank]) is (rank == 0)  # the others wait for rank 0 alone
        with process_of(envs[1 - rank]):
            assert may_come(envs[rank])


def test_ranks_that_cannot_be_seen_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_come(ranks(2)[0])  # this process was not started with RANK
    elsewhere = LaunchEnv(rank=0, world_size=2, master_addr="10.0.0.1", master_port=29500)
    own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    monkeypatch.setattr(peers, "started_with", lambda one: own if one == os.getpid() else {})
    assert may_come(elsewhere)
