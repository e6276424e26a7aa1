"""Hosts that meet without ssh: who starts what, who is lost, who comes back, and which verdict all of them follow.

Agents in threads with the real store, rendezvous and leader; their ranks are played.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch.distributed as dist

from harness.resilience import elastic, judging, launch, leading, rendezvous
from harness.resilience.hosts import HostDevices
from harness.resilience.options import read_options
from harness.resilience.script import Script
from harness.topology.env import SECRET, free_port
from harness.topology.signed_objects import signature
from harness.topology.signed_store import SIGNATURE_BYTES
from tests.unit.resilience.simulated import PlayedRanks, SimulatedRun

Play = Callable[[PlayedRanks], None]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds instead of minutes until a host counts as lost."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for module, name, seconds in (
        (rendezvous, "HEARTBEAT_S", 0.1),
        (rendezvous, "LOST_S", 0.5),
        (rendezvous, "PAUSED_S", 0.4),  # the whole process may stand still on a busy machine
        (elastic, "HEARTBEAT_S", 0.1),
        (elastic, "LAST_CALL_S", 0.4),
        (elastic, "AGAIN_S", 0.2),
        (elastic, "ANSWER_S", 0.4),
        (elastic, "NEWS_S", 0.05),
        (elastic, "SIGNAL_S", 0.1),
        (leading, "ANSWER_S", 0.4),
        (judging, "PAUSE_S", 0.1),
    ):
        monkeypatch.setattr(module, name, seconds)
    engine = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
    monkeypatch.setattr(f"{engine}._delay", lambda seconds: time.sleep(0.02))
    monkeypatch.setattr(f"{engine}._BackendRendezvousStateHolder.__init__.__defaults__", (0,))
    monkeypatch.setitem(elastic.ENDS, "fault", 0.2)
    monkeypatch.setitem(elastic.ENDS, "hosts", 0.2)
    monkeypatch.setitem(elastic.ENDS, "stop", 2.0)


def trains(ranks: PlayedRanks) -> None:
    """Be in step 2, until a signal asks to save and stop."""
    ranks.step(2)
    if ranks.signals:
        for rank in ranks.ranks:
            number = ranks.signals[0]
            ranks.fail(rank, error="Stopped", message=str(128 + number))
            ranks.exit(rank, 128 + number)


def wait_until(is_true: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.02)


def succeeds_at(number: int, before: Play = trains) -> Play:
    """Do as `before` until that start, which succeeds."""
    return lambda ranks: before(ranks) if ranks.number < number else ranks.succeed()


def test_ranks_fill_the_hosts_in_their_order_and_all_launches_end_alike(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, "--nnodes 2 --nproc_per_node 2", slots=2)
    second = run.add(succeeds_at(0), index=1)
    first = run.add(succeeds_at(0), index=0)
    assert run.codes() == [0, 0]
    (rank, command, environment), _ = second.ranks.commands
    assert rank == 2 and command[2:4] == ["scripts/train.py", "--local_rank=0"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR")
    assert [environment[name] for name in names] == ["2", "0", "4", "2", "1", "2", "10.0.0.0"]
    assert first.ranks.commands[0][2]["MASTER_PORT"] == environment["MASTER_PORT"]


def test_a_rank_that_is_killed_is_named_by_all_and_each_start_has_a_port_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice in a row: in torch's own restart the addresses of the start before are found again."""
    run = SimulatedRun(tmp_path, "--nnodes 2 --nproc_per_node 1 --max_restarts 3")
    ports = set()

    def dies(ranks: PlayedRanks) -> None:
        ports.add((ranks.number, ranks.commands[0][2]["MASTER_PORT"]))
        ranks.step(2 + ranks.number)
        ranks.exit(1, -signal.SIGKILL)
        ranks.fail(0, is_lost_peer=True, message="Connection closed by peer")

    for _ in range(2):
        run.add(succeeds_at(2, dies))
    assert run.codes() == [0, 0]
    said = capsys.readouterr().err
    assert said.count("rank 1 (a, stage 0) was killed by SIGKILL in step 2") == 2  # one line for each launch
    assert said.count("restart 2 of 3") == 2 and said.count("done, after 2 restarts") == 2
    assert len(ports) == 2 and len({port for _, port in ports}) == 2
    assert "--resume_from_checkpoint" in run.hosts[0].ranks.commands[0][1]


def test_a_lost_host_is_left_out_with_the_same_batch_and_taken_in_again_when_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SimulatedRun(tmp_path, "--nnodes 1:2 --nproc_per_node 2 --max_restarts 3", slots=2)
    first, second = run.add(succeeds_at(2)), run.add(trains)
    wait_until(lambda: second.ranks.number == 0)
    second.is_killed = True
    wait_until(lambda: first.ranks.number == 1)
    words = first.ranks.commands[0][1]
    assert words[words.index("--global_batch_size") + 1] == "16"  # as on four ranks: two data-parallel ones of 8
    assert first.ranks.commands[0][2]["WORLD_SIZE"] == "2"
    back = run.add(succeeds_at(2), index=1)
    assert run.codes()[::2] == [0, 0]
    assert first.ranks.commands[0][2]["WORLD_SIZE"] == "4" and back.ranks.ranks == [2, 3]
    said = capsys.readouterr().err
    assert "no answer from the agent on host-1, in step 2" in said
    assert "a host is back: going on with all hosts that answer" in said and "done, after 1 restart" in said


@pytest.mark.thorough
def test_the_host_that_leads_may_be_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SimulatedRun(tmp_path, "--nnodes 1:2 --nproc_per_node 1 --max_restarts 3 ", script=KNOWN_ZERO)
    first, second = run.add(trains), run.add(succeeds_at(1, lost_peer_when(lambda: first.is_killed)))
    wait_until(lambda: second.ranks.number == 0)
    first.is_killed = True
    assert run.codes()[1] == 0
    assert second.ranks.ranks == [0]
    assert "no answer from the agent on host-0, in step" in capsys.readouterr().err


def test_a_launch_that_was_stopped_joins_again_when_the_others_have_started_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has led, and judges nothing any more."""
    run = SimulatedRun(tmp_path, "--nnodes 1:2 --nproc_per_node 1 --max_restarts 3", script=KNOWN_ZERO)
    is_stopped, goes_on = threading.Event(), threading.Event()

    def stops(ranks: PlayedRanks) -> None:
        agent = run.hosts[0].agent
        if ranks.number == 0 and agent is not None:
            agent.heartbeat.close()
            is_stopped.set()
            goes_on.wait(20)
        succeeds_at(2)(ranks)

    def misses_it(ranks: PlayedRanks) -> None:
        (lost_peer_when(is_stopped.is_set) if ranks.number == 0 else succeeds_at(2))(ranks)

    run.add(stops)
    other = run.add(misses_it)
    wait_until(lambda: other.ranks.number == 1 and not other.ranks.is_ended)
    goes_on.set()
    assert run.codes() == [0, 0] and other.ranks.ranks == [1]
    assert "done, after 1 restart" in capsys.readouterr().err


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_lost_before_the_first_start_keeps_nobody_waiting(lost: int, tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, "--nnodes 1:2 --nproc_per_node 1", script=KNOWN_ZERO)
    first = run.add(trains, index=lost)
    wait_until(lambda: first.agent is not None and first.agent.handler.participants() != [])
    first.is_killed = True
    wait_until(lambda: first.code is not None)
    run.add(succeeds_at(0), index=1 - lost)
    assert run.codes() == [-9, 0]


KNOWN_ZERO = ("scripts/train.py", "--deepspeed_config", "zero2", "--max_steps", "9")


def lost_peer_when(is_lost: Callable[[], bool]) -> Play:
    def play(ranks: PlayedRanks) -> None:
        ranks.step(2)
        for rank in ranks.ranks if is_lost() else ():
            ranks.fail(rank, is_lost_peer=True, message="Connection closed by peer")
            ranks.exit(rank, 1)

    return play


def test_a_launch_that_is_told_to_stop_leaves_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when a pod is evicted: the ranks of all hosts save and stop, and nothing counts as a fault."""
    run = SimulatedRun(tmp_path, "--nnodes 1:2 --nproc_per_node 1", script=KNOWN_ZERO)
    told: list[int] = []

    def stops(ranks: PlayedRanks) -> None:
        ranks.signals = ranks.signals or told[:1]  # the ranks tell each other
        trains(ranks)

    first, second = run.add(succeeds_at(1, stops)), run.add(stops)
    wait_until(lambda: second.ranks.number == 0)
    told.append(signal.SIGTERM)
    second.received.append(signal.SIGTERM)
    assert run.codes() == [0, 128 + signal.SIGTERM]
    assert first.ranks.ranks == [0] and "going on without host-1, which was told to stop" in capsys.readouterr().err


def fails_at_once(ranks: PlayedRanks) -> None:
    """Play two ranks, of which the second has a device that does not work."""
    ranks.exit(1, 3)
    ranks.fail(0, is_lost_peer=True, step=0)
    if ranks.ranks == [0]:
        ranks.succeed()


def fails_in_step_2(ranks: PlayedRanks) -> None:
    ranks.step(2)
    ranks.fail(1, step=2)
    ranks.fail(0, is_lost_peer=True, step=2)


def needs_the_user(ranks: PlayedRanks) -> None:
    ranks.fail(1, step=0, is_user_error=True)
    for rank in range(2):
        ranks.exit(rank, 1)


@pytest.mark.parametrize(
    ("play", "code", "told"),
    [
        (fails_at_once, 0, ["device 1 of host-0 is left out: it failed twice before", "done, after 2 restarts"]),
        (fails_in_step_2, 1, ["failed in step 2: ValueError: wrong", "gave up: 3 faults in a row at step 2"]),
        (needs_the_user, 1, ["failed before the first step: ValueError: wrong"]),
    ],
)
def test_faults_that_repeat(
    play: Play, code: int, told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SimulatedRun(tmp_path, "--nproc_per_node 2 --max_restarts 9 --min_ranks 1", slots=2, script=KNOWN_ZERO)
    run.add(play)
    assert run.codes() == [code]
    said = capsys.readouterr().err
    assert all(each in said for each in told)
    assert said.count("restart ") == (0 if play is needs_the_user else 2)


def test_where_all_hosts_are_needed_a_signal_to_one_ends_the_run(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, "--nnodes 2 --nproc_per_node 1 --max_restarts 3", script=KNOWN_ZERO)
    told: list[int] = []

    def stops(ranks: PlayedRanks) -> None:
        ranks.signals = ranks.signals or told[:1]
        trains(ranks)

    hosts = [run.add(stops), run.add(stops)]
    wait_until(lambda: hosts[1].ranks.number == 0)
    told.append(signal.SIGUSR1)
    hosts[1].received.append(signal.SIGUSR1)
    assert run.codes() == [128 + signal.SIGUSR1] * 2


def test_too_few_ranks_are_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SimulatedRun(tmp_path, "--nnodes 1:2 --nproc_per_node 1 --min_ranks 2", script=KNOWN_ZERO)
    run.add(succeeds_at(1))
    wait_until(lambda: run.hosts[0].ranks.number == 0)
    assert run.hosts[0].ranks.commands == []
    run.add(succeeds_at(1))
    assert run.codes() == [0, 0]
    assert capsys.readouterr().err.count("1 of 2 devices are left: waiting for at least 2 ranks") == 1


def test_a_script_whose_layouts_are_not_known_waits_for_all_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SimulatedRun(tmp_path, "--nnodes 1:2 --nproc_per_node 1", script=("mine.py", "--depth", "3"))
    run.add(trains)
    wait_until(lambda: "waiting for at least 1 ranks" in capsys.readouterr().err)  # a script of unknown layouts
    run.hosts[0].received.append(signal.SIGINT)
    assert run.codes() == [128 + signal.SIGINT]


def test_when_the_store_is_lost_and_back_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """As when the pod that serves it was lost: the others know how often the run has started."""
    run = SimulatedRun(tmp_path, "--nnodes 2 --nproc_per_node 1 --max_restarts 3", script=KNOWN_ZERO)
    hosts = [run.add(succeeds_at(1)) for _ in range(2)]
    wait_until(lambda: all(host.ranks.number == 0 for host in hosts))
    run.lose_store()
    assert run.codes() == [0, 0]
    assert [host.ranks.number for host in hosts] == [1, 1]
    assert hosts[0].ranks.commands[0][1][-2:] == ["--resume_from_checkpoint", "auto"]


@pytest.mark.thorough
def test_a_launch_whose_connection_to_its_own_store_breaks_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device is counted among the visible ones."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    ports: list[int] = []

    def serve(listener: socket.socket) -> dist.TCPStore:
        ports.append(listener.getsockname()[1])
        return real_serve(listener)

    def play(ranks: PlayedRanks) -> None:
        if starts.count(ranks.records) == 0:
            starts.append(ranks.records)
            if len(starts) == 1:
                break_connections(ports[0])
        if len(starts) == 2:
            ranks.succeed()

    real_serve, starts = rendezvous.serve, []
    monkeypatch.setattr(rendezvous, "serve", serve)
    played = PlayedRanks(tmp_path, play)
    control = SimpleNamespace(look=lambda: None, received=[])
    meeting = ["--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    options = read_options(["--max_restarts", "1", *meeting, *KNOWN_ZERO])
    host = HostDevices(name="localhost", devices=(2,))
    assert launch._meet_and_run(options, host, Script(options.script), played, control) == 0
    assert len(starts) == 2
    assert played.commands[0][2]["CUDA_VISIBLE_DEVICES"] == "GPU-c"


def test_an_agent_that_was_stopped_itself_takes_nobody_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = rendezvous.run_store(SimulatedRun(tmp_path, "").store, "run"), [0.0]
    ours = rendezvous.Heartbeat(store, "a")
    rendezvous.Heartbeat(store, "b").close()
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    assert ours.lost(["a", "b"]) == []
    clock[0] = 45.0
    assert ours.lost(["a", "b"]) == []  # stopped until now
    clock[0] = 45.3
    assert ours.lost(["a", "b"]) == []
    clock[0] = 45.6
    assert ours.lost(["a", "b"]) == ["b"]
    ours.close()


def test_only_connections_to_the_store_are_broken_when_nothing_is_acknowledged() -> None:
    """This process may have sockets of other kinds, as its input under Node.js."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, theirs:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            rendezvous.break_silent_connections(port)
            found = [each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for each in (connection, server)]
    assert found == [1, 0]


def break_connections(port: int) -> None:
    """End this process's connections to a port, as the kernel does when a network is down for long."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)


def test_the_wait_for_hosts_ends_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic, "HOSTS_S", 0.3)
    run = SimulatedRun(tmp_path, "--nnodes 2 --nproc_per_node 1", script=KNOWN_ZERO)
    run.add(trains)
    assert run.codes() == [1] and "only 1 of at least 2 hosts joined within 0 minutes" in capsys.readouterr().err


def test_a_program_that_accepts_and_says_nothing_is_waited_for_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "TELL_S", 0.1)
    looks = iter(range(9))

    def look() -> None:
        if next(looks) == 2:
            raise KeyboardInterrupt  # as a signal ends the wait

    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = "127.0.0.1", other.getsockname()[1]
        with pytest.raises(KeyboardInterrupt):
            rendezvous.connect(endpoint, look, "ds-harness train")
    said = capsys.readouterr().err
    assert said == f"ds-harness train: {endpoint[0]}:{endpoint[1]}: waiting for the store of the run: no answer\n"


class Skewed(datetime):
    """A clock that each call reads on another host, minutes apart."""

    calls: ClassVar[list[None]] = []

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        cls.calls.append(None)
        return datetime.now(tz) - timedelta(minutes=len(cls.calls) % 7)


def test_clocks_of_hosts_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's rendezvous takes an agent for dead whose clock is 15 s behind."""
    monkeypatch.setattr("torch.distributed.elastic.rendezvous.dynamic_rendezvous.datetime", Skewed)
    run = SimulatedRun(tmp_path, "--nnodes 3 --nproc_per_node 1", script=("mine.py",))
    for _ in range(3):
        run.add(succeeds_at(0))
    assert run.codes() == [0, 0, 0] and Skewed.calls


class Trap:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("secret", ["", "of the run"])
@pytest.mark.thorough
def test_what_another_user_writes_into_the_store_is_not_executed(
    tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into every key: a pickle, as it is, in torch's coding of the rendezvous, and signed without the secret."""
    monkeypatch.setenv(SECRET, secret)
    pickled = pickle.dumps(Trap(tmp_path / "executed"))
    encoded = base64.b64encode(pickled)
    forms: list[Callable[[str], bytes]] = [
        lambda _: pickled,
        lambda _: encoded,
        lambda key: signature("", key, pickled).hex().encode() + pickled,
        lambda key: signature("", key, encoded).hex().encode() + encoded,
    ]
    for number, form in enumerate(forms):
        run = SimulatedRun(tmp_path / str(number), "--nnodes 2 --nproc_per_node 1 --max_restarts 3")
        hosts = [run.add(trains) for _ in range(2)]
        wait_until(lambda: all(host.ranks.number == 0 for host in hosts))  # noqa: B023  # it waits here
        stranger = run.store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        for key in stranger.list_keys():
            if not (value := stranger.get(key)) or len(value) > SIGNATURE_BYTES:  # others are counters
                stranger.set(key, form(key))
        assert run.codes() == [1, 1]
        assert all("was not written with its secret: give all hosts the same" in host.error for host in hosts)
    assert not (tmp_path / "executed").exists()


def test_hosts_with_different_secrets_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimulatedRun(tmp_path, "--nnodes 2 --nproc_per_node 1")
    hosts = []
    for secret in ("one", "another"):
        monkeypatch.setenv(SECRET, secret)
        hosts.append(run.add(trains))
        wait_until(lambda: hosts[-1].agent is not None or hosts[-1].code is not None)
    wait_until(lambda: any(host.code for host in hosts))
    assert any(f"give all hosts the same {SECRET}" in host.error for host in hosts)
    hosts[0].is_killed = True
