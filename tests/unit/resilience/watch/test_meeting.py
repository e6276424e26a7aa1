"""What a rank that fails before the ranks meet tells the others."""

from __future__ import annotations

import atexit
from typing import Any

import pytest

from harness.errors import UserError
from harness.resilience.process import signals
from harness.resilience.process.records import THIS_RANK
from harness.resilience.watch.meeting import telling_of_a_failure
from harness.topology import rendezvous
from harness.topology.env import LaunchEnv

ENV = LaunchEnv(rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=1, launched=True)
BEGIN = f"rank 1 (host {THIS_RANK.host}) has failed before the ranks met: "


def told(env: LaunchEnv, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fail with `error`, exit, and return what the other ranks are told."""
    at_exit: list[tuple[Any, ...]] = []
    texts: list[str] = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    monkeypatch.setattr(rendezvous, "tell_failure", lambda _, text: texts.append(text))
    with pytest.raises(type(error)), telling_of_a_failure(env):
        raise error
    for function, *arguments in at_exit:
        function(*arguments)
    return texts


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("the row is broken\nhere"), "ValueError: the row is broken"),
        (SystemExit(7), "exit code 7"),
        (UserError("--train_file a: no such file"), "--train_file a: no such file"),
    ],
)
def test_an_error_is_told_by_its_first_line(error: BaseException, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(ENV, error, monkeypatch) == [BEGIN + text]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), signals.Stopped(15), rendezvous.NotMet("rank 0 has failed")])
def test_nobody_is_told_what_all_ranks_know(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(ENV, error, monkeypatch) == []


@pytest.mark.parametrize("parent", ["ds-harness", "torchrun", "mpi"])
def test_nobody_is_told_where_the_launcher_ends_the_others(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = LaunchEnv(rank=1, world_size=2, local_rank=1, local_world_size=2, parent=parent)
    assert told(env, ValueError("wrong"), monkeypatch) == told(LaunchEnv(), ValueError("wrong"), monkeypatch) == []
