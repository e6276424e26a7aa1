"""What a rank that fails before the ranks meet tells the others."""

from __future__ import annotations

import atexit
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from harness.errors import NotMet, UserError
from harness.resilience.process import signals
from harness.resilience.watch import meeting
from harness.resilience.watch.meeting import telling_of_a_failure
from harness.topology.env import LaunchEnv

ENV = LaunchEnv(rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=1, launched=True)
ENDED_TOGETHER = [replace(ENV, parent=parent) for parent in ("ds-harness", "torchrun", "mpi")]


def told(env: LaunchEnv, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fail with `error`, exit, and return what the other ranks are told."""
    at_exit: list[tuple[Any, ...]] = []
    texts: list[str] = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    monkeypatch.setattr(meeting, "tell", lambda _, text: texts.append(text))
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
    assert told(ENV, error, monkeypatch) == [text]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), signals.Stopped(15), NotMet("rank 0 has failed")])
def test_nobody_is_told_what_all_ranks_know(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(ENV, error, monkeypatch) == []


@pytest.mark.parametrize("env", [LaunchEnv(), *ENDED_TOGETHER])
def test_nobody_is_told_where_the_launcher_ends_the_others(env: LaunchEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(env, ValueError("wrong"), monkeypatch) == []


def test_nobody_is_told_after_the_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert told(ENV, ValueError("wrong"), monkeypatch) == []
