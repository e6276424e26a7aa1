"""Which hosts an attempt gets, in which layout it goes on, and what each host is told to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.resilience import gathering as module
from harness.resilience.gathering import Gathering, Team, _used
from harness.resilience.hosts import HostDevices
from harness.resilience.on_host.messages import Order, read_message
from harness.resilience.options import read_options
from harness.resilience.script import Script, Start
from harness.topology.env import PORTS, RECORDS
from harness.topology.layout import Layout
from tests.unit.resilience.piped import PipedAgent, host

KNOWN = ("scripts/train.py", "--deepspeed_config", "tensor_parallel", "--max_steps", "9")
Gather = Callable[..., Gathering]


@pytest.fixture
def gather(monkeypatch: pytest.MonkeyPatch) -> Gather:
    """Two hosts of two devices, of which some do not answer."""

    def made(*flags: str, script: tuple[str, ...] = KNOWN, silent: Sequence[str] = ()) -> Gathering:
        options = read_options([*flags, *script])
        found = Gathering(options, [host("a"), host("b")], Script(options.script))
        agents = lambda hosts: [PipedAgent(one) for one in hosts if one.name not in silent]  # noqa: E731
        monkeypatch.setattr(found, "_connect", agents)
        return found

    return made


def devices(team: Team) -> list[tuple[str, int]]:
    return [team.device(rank) for rank in range(team.start.ranks)]


def test_all_that_answer_start_as_the_user_asked(gather: Gather) -> None:
    team = gather().team(0, pytest.fail, [])
    assert team is not None and team.start == Start(words=KNOWN, ranks=4)
    assert devices(team) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    again = gather("--max_restarts", "1").team(1, pytest.fail, [])
    assert again is not None and again.start.words == (*KNOWN, "--resume_from_checkpoint", "auto")


def test_a_host_that_does_not_answer_is_left_out(gather: Gather) -> None:
    said: list[str] = []
    gathering = gather("--max_restarts", "1", silent=["b"])
    team = gathering.team(0, said.append, [])
    assert team is not None and said == ["no answer from b: going on without"]
    assert str(team.start) == "pp1 x dp1 x tp2 on 2 ranks" and devices(team) == [("a", 0), ("a", 1)]
    assert [one.name for one in gathering.missing] == ["b"]


@pytest.mark.parametrize(
    ("flags", "silent", "failing", "said"),
    [
        pytest.param([], ["b"], set(), "no answer from b, and no layout of at least 4 ranks fits", id="no restarts"),
        pytest.param([], ["a", "b"], set(), "no answer from a, b, and no layout of at least 4 ranks", id="nobody"),
        pytest.param(
            ["--max_restarts", "1", "--min_ranks", "4"],
            [],
            {("a", 1)},
            "3 of 4 devices are left, and no layout of at least 4 ranks fits what is left",
            id="fewer devices than wanted",
        ),
        pytest.param(
            ["--max_restarts", "1"],
            [],
            {("a", 0), ("a", 1), ("b", 0), ("b", 1)},
            "0 of 4 devices are left",
            id="none left",
        ),
    ],
)
def test_too_few_are_refused_in_one_line(
    flags: list[str], silent: list[str], failing: set[tuple[str, int]], said: str, gather: Gather
) -> None:
    gathering = gather(*flags, silent=silent)
    gathering.failing = failing
    with pytest.raises(UserError, match=said) as refused:
        gathering.team(0, pytest.fail, [])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "script", "fewest"),
    [
        pytest.param(["--min_ranks", "3"], KNOWN, 3, id="more ranks are wanted"),
        pytest.param([], ("mine.py", "--depth", "3"), 1, id="a script whose layout is not known"),
    ],
)
def test_hosts_are_waited_for_until_a_signal_comes(
    flags: list[str], script: tuple[str, ...], fewest: int, gather: Gather, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    said: list[str] = []
    monkeypatch.setattr(module, "wait", lambda *_: received.append(15) if len(said) == 2 else None)
    gathering = gather("--max_restarts", "1", *flags, script=script, silent=["b"])
    assert gathering.team(0, said.append, received) is None
    assert said == [f"no answer from b: waiting for at least {fewest} ranks"] * 2


def test_a_wait_ends_at_last(gather: Gather, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOSTS_S", -1.0)
    with pytest.raises(UserError, match="no answer from b, and no layout of at least 3 ranks fits what is left"):
        gather("--max_restarts", "1", "--min_ranks", "3", silent=["b"]).team(0, pytest.fail, [])


def test_a_device_that_is_left_out_leaves_its_host_the_others(gather: Gather) -> None:
    gathering = gather("--max_restarts", "2", "--min_ranks", "1")
    gathering.failing = {("a", 0)}
    team = gathering.team(0, pytest.fail, [])
    assert team is not None and team.start.ranks == 2  # tp2: two of the three that are left
    assert devices(team) == [("b", 0), ("b", 1)]  # which share a host


@pytest.mark.parametrize(
    ("slots", "start", "used"),
    [
        pytest.param([3, 3], Start(words=(), ranks=4), [(0, 1, 2), (0,)], id="as many as are wanted"),
        pytest.param([2, 2, 2], Start(words=(), ranks=4), [(0, 1), (0, 1)], id="a host is not needed"),
        pytest.param(
            [3, 3, 3],
            Start(words=(), ranks=6, layout=Layout(pp_size=1, tp_size=2, dp_size=3)),
            [(0, 1), (0, 1), (0, 1)],
            id="tensor-parallel groups share hosts",
        ),
        pytest.param(
            [1, 2],
            Start(words=(), ranks=2, layout=Layout(pp_size=1, tp_size=2, dp_size=1)),
            [(0, 1)],
            id="a host too small for a group",
        ),
        pytest.param(
            [1, 1],
            Start(words=(), ranks=2, layout=Layout(pp_size=1, tp_size=2, dp_size=1)),
            [(0,), (0,)],
            id="where no host holds a group it is torn",
        ),
    ],
)
def test_devices_are_cut_to_what_the_start_needs(slots: list[int], start: Start, used: list[tuple[int, ...]]) -> None:
    agents = [PipedAgent(host(f"host-{number}", count)) for number, count in enumerate(slots)]
    kept = _used(agents, start)
    assert [agent.host.devices for agent in kept] == used
    assert all(agent.ends.is_ended == (agent not in kept) for agent in agents)


def orders(*flags: str, script: tuple[str, ...] = ("train.py", "--lr", "1")) -> list[Order]:
    """What the agents of two hosts, with devices 2 and 3, and 0, are told to start."""
    options = read_options([*flags, *script])
    hosts = [HostDevices(name="a", devices=(2, 3)), HostDevices(name="203.0.113.7", devices=(0,))]
    agents = [PipedAgent(one) for one in hosts]
    team = Team(agents=list(agents), start=Start(words=options.script, ranks=3))
    Gathering(options, hosts, Script(options.script)).order(team, Path("/records/0001"), Path("/records"))
    found = [read_message(line) for agent in agents for line in agent.told()]
    assert all(isinstance(one, Order) for one in found) and not os.get_blocking(agents[0].ends.stdin.fileno())
    return [one for one in found if isinstance(one, Order)]


def test_each_rank_gets_its_place() -> None:
    first, second = orders("--master_port", "1234", "--master_addr", "10.0.0.1")
    assert (first.records, first.root, first.folder) == ("/records/0001", "/records", str(Path.cwd()))
    environments = [environment for order in (first, second) for _, _, environment in order.ranks]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [[one[name] for name in names] for one in environments] == [
        ["0", "0", "2", "3", "0", "2"],
        ["1", "1", "2", "3", "0", "2"],
        ["2", "0", "1", "3", "1", "2"],
    ]
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"], one[RECORDS]) for one in environments} == {
        ("10.0.0.1", "1234", "/records/0001")
    }
    assert [rank for order in (first, second) for rank, _, _ in order.ranks] == [0, 1, 2]
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in second.environment


def test_rank_0_listens_on_the_first_host_at_a_free_port() -> None:
    (_, _, environment), *_ = orders()[0].ranks
    assert environment["MASTER_ADDR"] == "a" and int(environment["MASTER_PORT"]) in PORTS


PYTHON = [sys.executable, "-u"]


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        ([], [*PYTHON, "train.py", "--local_rank=1", "--lr", "1"]),
        (["--module"], [*PYTHON, "-m", "train.py", "--local_rank=1", "--lr", "1"]),
        (["--no_local_rank"], [*PYTHON, "train.py", "--lr", "1"]),
        (["--no_python"], ["train.py", "--local_rank=1", "--lr", "1"]),
        (["--no_python", "--no_local_rank"], ["train.py", "--lr", "1"]),
    ],
)
def test_the_command_of_a_rank(flags: list[str], command: list[str]) -> None:
    assert orders(*flags)[0].ranks[1][1] == command


@pytest.mark.parametrize(
    ("flags", "script", "is_wanted"),
    [
        (["--max_restarts", "1"], KNOWN, True),
        ([], KNOWN, False),
        (["--max_restarts", "1", "--no_standby"], KNOWN, False),
        (["--max_restarts", "1"], ("mine.py",), False),  # it may set variables before it imports
    ],
)
def test_a_process_stands_by_where_a_restart_may_come(
    flags: list[str], script: tuple[str, ...], is_wanted: bool, gather: Gather, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert gather(*flags, script=script).ready.is_wanted == (is_wanted and sys.platform == "linux")
