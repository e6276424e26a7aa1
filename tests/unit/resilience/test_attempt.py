"""One start of all ranks as the supervisor follows it: what agents report, when it is over, which signals go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.resilience import attempt as module
from harness.resilience.attempt import Attempt
from harness.resilience.cause import Ended
from harness.resilience.on_host.messages import MARK, LineReader, Order, Preparation, read_message
from harness.resilience.process.records import SUCCESS
from tests.unit.resilience.piped import PipedAgent, host, write_failure

NOW, LATER = -1.0, 1000.0  # how long to wait after the first end: not at all, or for ever


@pytest.fixture
def agent() -> Iterator[PipedAgent]:
    found = PipedAgent(host())
    yield found
    found.end()


def is_over(attempt: Attempt) -> bool:
    for one in attempt.agents:
        one.read()
    attempt.lost = [one.host for one in attempt.agents if one.is_lost()]
    return attempt._is_over()


def test_reports_are_taken_in_and_the_rest_is_printed(agent: PipedAgent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.read()
    assert not agent.answered and agent.reports == []
    agent.say()  # a sign of life
    os.write(agent.ends.answers, b"loss 1.5\n" + f"{MARK}".encode() + b'{"rank": 1, "code": -9, "time": 2.5}\nhalf a')
    agent.read()
    assert agent.answered and agent.reports == [{"rank": 1, "code": -9, "time": 2.5}]
    os.write(agent.ends.answers, " line \xff\n".encode("latin-1"))
    agent.read()
    assert capsys.readouterr().out.splitlines() == ["loss 1.5", "half a line \ufffd"]


def test_an_agent_is_lost_when_it_is_gone_or_silent(agent: PipedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not agent.is_lost()
    with monkeypatch.context() as patch:
        patch.setattr(module, "SILENT_S", -1.0)
        assert agent.is_lost()
    agent.say(rank=0, code=0)
    agent.hang_up()
    agent.read()
    assert agent.is_lost() and len(agent.reports) == 1  # what it has said last counts


@pytest.mark.parametrize(
    ("codes", "records", "told_s", "done_s", "over"),
    [
        pytest.param({}, {}, NOW, NOW, False, id="all run"),
        pytest.param({0: 0, 1: 0}, {}, LATER, LATER, True, id="all have ended"),
        pytest.param({0: 1, 1: -9}, {}, LATER, LATER, True, id="all have ended badly"),
        pytest.param({1: 0}, {}, NOW, NOW, False, id="one has ended well: the others may take as long as they like"),
        pytest.param({0: 1}, {}, LATER, NOW, False, id="one has died: the others say why"),
        pytest.param({0: 1}, {}, NOW, LATER, True, id="but only for a moment"),
        pytest.param({}, {1: {}}, LATER, NOW, False, id="one has recorded a failure"),
        pytest.param({}, {0: {}, 1: {}}, LATER, LATER, True, id="all have recorded failures"),
        pytest.param({0: 1}, {1: {}}, LATER, LATER, True, id="each rank has ended or said why"),
        pytest.param(
            {}, {0: {"is_user_error": True}, 1: {}}, LATER, LATER, False, id="a message is still being printed"
        ),
        pytest.param({}, {0: {"is_user_error": True}, 1: {}}, NOW, LATER, True, id="but not for ever either"),
        pytest.param({0: 143}, {0: {"error": "Stopped"}}, NOW, LATER, False, id="a stop: the others save too"),
        pytest.param({0: 143}, {0: {"error": "Stopped"}}, LATER, NOW, True, id="but not for ever"),
        pytest.param({0: 143}, {0: {"error": "Stopped"}, 1: {}}, LATER, LATER, True, id="a stop and a failure"),
    ],
)
def test_when_an_attempt_of_two_ranks_is_over(
    codes: dict[int, int],
    records: dict[int, dict[str, Any]],
    told_s: float,
    done_s: float,
    over: bool,
    agent: PipedAgent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TOLD_S", told_s)
    monkeypatch.setattr(module, "DONE_S", done_s)
    for rank, code in codes.items():
        agent.say(rank=rank, code=code)
    for rank, more in records.items():
        write_failure(tmp_path, rank, **more)
    assert is_over(Attempt([agent], 2, tmp_path)) == over


def test_when_all_work_is_done_ranks_that_do_not_end_are_ended(
    agent: PipedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt([agent], 2, tmp_path)
    agent.say(rank=0, code=0)
    (tmp_path / SUCCESS).write_text("{}")
    assert not is_over(attempt)
    monkeypatch.setattr(module, "DONE_S", NOW)
    assert is_over(attempt)


def test_a_lost_host_ends_the_attempt(tmp_path: Path) -> None:
    agent, other = PipedAgent(host()), PipedAgent(host("b"))
    attempt = Attempt([agent, other], 4, tmp_path)
    assert not is_over(attempt)
    other.hang_up()
    assert is_over(attempt) and [one.name for one in attempt.lost] == ["b"]
    attempt.end()
    assert agent.ends.is_ended and other.ends.is_ended


def test_a_run_of_an_attempt_passes_signals_on_once_and_returns_the_ends(agent: PipedAgent, tmp_path: Path) -> None:
    received = [int(signal.SIGUSR1)]
    attempt = Attempt([agent], 2, tmp_path)
    ticks = []

    def tick(found: Attempt) -> None:
        ticks.append(found)
        if len(ticks) == 1:
            received.append(int(signal.SIGTERM))
            agent.say(rank=0, code=0)
        elif len(ticks) == 2:
            agent.say(rank=1, code=3)

    ended = attempt.run(received, tick)
    assert sorted(ended, key=lambda end: end.rank) == [
        Ended(rank=0, host="localhost", code=0, time=1.0),
        Ended(rank=1, host="localhost", code=3, time=1.0),
    ]
    told = [line for line in agent.told() if line != "0"]  # "0" only asks for an answer
    assert told == [str(int(signal.SIGUSR1)), str(int(signal.SIGTERM))]
    assert all(found is attempt for found in ticks)


def test_what_an_agent_that_is_gone_would_be_told_is_dropped(agent: PipedAgent) -> None:
    os.close(agent.ends.orders)
    agent.send(b"15\n")  # and nothing is raised
    agent.ends.orders = os.open(os.devnull, os.O_RDONLY)


TEXTS = st.text(max_size=8)
NAMES = st.dictionaries(TEXTS, TEXTS, max_size=2)
COMMON = {"records": TEXTS, "folder": TEXTS, "environment": NAMES, "out": st.none() | st.integers(0, 9)}
RANKS = st.lists(st.tuples(st.integers(0, 99), st.lists(TEXTS, max_size=2), NAMES), max_size=2)
MESSAGES = st.builds(Preparation, modules=st.tuples(TEXTS), **COMMON) | st.builds(
    Order, root=TEXTS, ranks=RANKS, is_remote=st.booleans(), stopped_s=st.floats(0, 99), **COMMON
)


@given(MESSAGES)
def test_a_message_arrives_as_it_was_sent(message: Preparation | Order) -> None:
    line = message.line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    found = read_message(line.decode())
    assert type(found) is type(message) and found.line() == line
    assert (found.records, found.environment, found.out) == (message.records, message.environment, message.out)


@given(st.lists(st.text(max_size=9).filter(lambda text: "\n" not in text), max_size=4), st.integers(1, 7))
def test_lines_are_whole_however_they_come(lines: list[str], size: int) -> None:
    source, target = os.pipe()
    reader, found = LineReader(source), []
    data = "".join(f"{line}\n" for line in lines).encode() + b"the rest"
    for start in range(0, len(data), size):
        os.write(target, data[start : start + size])
        found += reader.read()
    assert found == lines and not reader.is_closed
    os.close(target)
    assert reader.read() == [] and reader.is_closed  # a line that never ended is none
    os.close(source)
