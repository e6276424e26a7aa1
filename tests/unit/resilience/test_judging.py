"""What follows a start: go on, pause, leave a device out, give up, and with which words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.resilience.cause import Cause, Device
from harness.resilience.judging import History, Verdict, judge


class Run:
    """Judges one start after another."""

    def __init__(self, most: int, *, leaves_out: bool = False) -> None:
        self.most, self.leaves_out, self.history = most, leaves_out, History(start=0, is_open=True)
        self.verdicts: list[Verdict] = []

    def judge(
        self, cause: Cause | None, device: Device | None = ("b", 1), received: int = 0, goes_on: str = ""
    ) -> int | None:
        verdict, self.history = judge(
            self.history,
            cause and replace(cause, device=device),
            most=self.most,
            leaves_out=self.leaves_out,
            received=received,
            goes_on=goes_on,
        )
        assert not self.history.is_open
        self.verdicts.append(verdict)
        return verdict.code

    @property
    def said(self) -> list[str]:
        return [line for verdict in self.verdicts for line in verdict.lines]


def fault(step: int, rank: int | None = 1, **more: object) -> Cause:
    return Cause(text=f"it broke in step {step}", step=step, rank=rank, **more)  # type: ignore[arg-type]


def test_a_run_that_ends_well_says_nothing() -> None:
    run = Run(2)
    assert run.judge(None) == 0 and run.said == []


def test_a_restart_is_said_and_so_is_the_end_after_it() -> None:
    run = Run(2)
    assert [run.judge(fault(7)), run.judge(fault(9)), run.judge(None)] == [None, None, 0]
    assert run.said == [
        "it broke in step 7",
        "restart 1 of 2",
        "it broke in step 9",
        "restart 2 of 2",
        "done, after 2 restarts",
    ]


def test_without_restarts_the_first_fault_ends_the_run() -> None:
    run = Run(0)
    assert run.judge(fault(7, code=137)) == 137 and run.said == ["it broke in step 7"]


def test_the_faults_are_listed_when_the_restarts_are_used_up() -> None:
    run = Run(1)
    assert run.judge(fault(3)) is None and run.judge(fault(8, code=9)) == 9
    assert run.said[-1] == ("gave up: 1 restart is used up\n  step 3: it broke in step 3\n  step 8: it broke in step 8")


def test_three_faults_in_a_row_at_one_step_are_enough() -> None:
    run = Run(99)
    assert [run.judge(fault(step)) for step in (5, 4, 5, 5, 5)] == [None, None, None, None, 1]
    assert [verdict.pause for verdict in run.verdicts] == [0.0, 0.0, 0.0, 2.0, 0.0]
    assert "restart 4 of 99 in 2 s" in run.said and "gave up: 3 faults in a row at step 5" in run.said[-1]


def test_what_may_pass_is_waited_for_longer_each_time() -> None:
    """A disk that is full for some minutes must not use up the restarts."""
    run = Run(99)
    assert [run.judge(fault(5, may_pass=True)) for _ in range(5)] == [None] * 4 + [1]
    assert [verdict.pause for verdict in run.verdicts] == [0.0, 10.0, 60.0, 300.0, 0.0]
    assert "gave up: 5 faults in a row at step 5" in run.said[-1]


def test_three_restarts_outlast_a_disk_that_is_full_for_a_minute() -> None:
    """A rank dies, and the starts after that find a disk on which no checkpoint can be written."""
    run, full = Run(3), fault(0, rank=0, is_final=True, may_pass=True)
    assert [run.judge(each) for each in (fault(27, may_pass=True), full, full)] == [None] * 3
    assert [verdict.pause for verdict in run.verdicts] == [0.0, 10.0, 60.0]


@given(st.lists(st.integers(0, 2), max_size=8), st.integers(0, 6))
def test_it_gives_up_at_the_right_fault(steps: list[int], most: int) -> None:
    run = Run(most)
    for number, step in enumerate(steps, start=1):
        in_a_row = number >= 3 and len(set(steps[number - 3 : number])) == 1
        assert run.judge(fault(step)) == (1 if number > most or in_a_row else None)
        if number > most or in_a_row:
            return


def test_what_the_user_must_fix_is_not_tried_again() -> None:
    run = Run(5)
    assert run.judge(fault(0, rank=0, is_final=True)) == 1
    assert run.said == []  # rank 0 has said it itself
    assert run.judge(fault(0, rank=3, is_final=True)) == 1 and "it broke in step 0" in run.said
    assert run.judge(fault(4)) is None
    assert run.judge(fault(0, is_final=True)) is None  # it has worked before, so it may again


def test_a_signal_to_the_launch_ends_the_run_and_is_no_fault() -> None:
    run = Run(5)
    assert run.judge(fault(4, is_stop=True, code=143), received=15) == 143
    assert run.judge(fault(4, may_pass=True), received=10) == 138  # ranks that Slurm has killed meanwhile
    assert run.judge(None, received=15) == 0  # all work was done meanwhile
    assert run.history.faults == ()


def test_a_stop_because_hosts_have_come_or_left_is_no_fault() -> None:
    run = Run(1)
    assert run.judge(fault(4, is_stop=True, code=138), goes_on="a host is back") is None
    assert run.history.faults == () and run.said == ["a host is back"]
    assert run.judge(fault(4), goes_on="a host is back") is None  # the ranks failed before they could stop: a fault
    assert len(run.history.faults) == 1


@pytest.mark.parametrize(
    ("leaves_out", "faults", "left_out"),
    [
        pytest.param(True, [(0, ("b", 1)), (0, ("b", 1))], (("b", 1),), id="twice before the first step"),
        pytest.param(True, [(0, ("a", 0)), (0, ("b", 1))], (), id="another device"),
        pytest.param(True, [(0, ("b", 1)), (1, ("b", 1))], (), id="a step was made"),
        pytest.param(True, [(0, None), (0, None)], (), id="no rank failed"),
        pytest.param(False, [(0, ("b", 1)), (0, ("b", 1))], (), id="all ranks are wanted"),
        pytest.param(True, [(0, ("b", 1))], (), id="once"),
    ],
)
def test_a_device_that_fails_at_once_is_left_out(
    leaves_out: bool, faults: list[tuple[int, Device | None]], left_out: tuple[Device, ...]
) -> None:
    run = Run(9, leaves_out=leaves_out)
    for step, device in faults:
        assert run.judge(fault(step), device) is None
    assert run.history.failing == left_out
    assert ("device 1 of b is left out: it failed twice before the first step" in run.said) == bool(left_out)
