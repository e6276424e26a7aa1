"""What is said of an attempt that failed: the first cause, from records and exit codes."""

from __future__ import annotations

import signal

import pytest

from harness.resilience.cause import Cause, first_cause
from harness.resilience.on_host.ranks import Exit
from harness.resilience.process.records import Failure, Position


def failure(rank: int, time: float, **more: object) -> Failure:
    stated = {"host": "a", "pid": 1, "stage": rank, "step": 7, "doing": "training", "error": "ValueError"}
    flags = {"message": "wrong", "is_user_error": False, "is_lost_peer": False}
    return Failure(**{**stated, **flags, "rank": rank, "time": time, **more})


def end(rank: int, code: int, time: float = 1.0) -> Exit:
    return Exit(rank, code, time)


POSITIONS = {rank: Position(rank=rank, host="a", stage=rank, step=7, doing="training") for rank in range(2)}


def cause(failures: list[Failure], ended: list[Exit], oom_kills: int | None = 0) -> Cause:
    found = first_cause(failures, ended, POSITIONS, oom_kills=oom_kills)
    assert found is not None
    return found


def test_a_killed_rank_goes_before_what_its_peers_say() -> None:
    found = cause([failure(0, 1.1, is_lost_peer=True)], [end(1, -9)])
    assert found.text == "rank 1 (a, stage 1) was killed by SIGKILL in step 7"
    assert (found.step, found.rank, found.code) == (7, 1, 1)  # 137: the launch itself was killed
    stopped = cause([failure(1, 1.1, error="Silent", message="no answer")], [end(1, -19)])
    assert stopped.text == "rank 1 (a, stage 1) was stopped by SIGSTOP in step 7"


@pytest.mark.parametrize(
    ("kills", "said"), [(0, ""), (1, "killed by the system: out of memory"), (None, "killed by the system: memory?")]
)
def test_memory_is_named_where_the_system_says_so(kills: int | None, said: str) -> None:
    text = cause([], [end(1, -9)], kills).text
    assert text.endswith(said or "in step 7")


def test_the_first_error_of_its_own_counts() -> None:
    found = cause([failure(0, 1.0, is_lost_peer=True), failure(1, 1.2)], [end(1, 1, 7.0)])
    assert found.text == "rank 1 (a, stage 1) failed in step 7: ValueError: wrong"
    saving = cause([failure(1, 1.2, doing="saving", message="")], [])
    assert saving.text == "rank 1 (a, stage 1) failed in step 7 (saving): ValueError"


def test_only_what_is_wrong_before_the_first_step_is_final() -> None:
    assert cause([failure(0, 1.0, is_user_error=True, step=0)], []).is_final
    assert not cause([failure(0, 1.0, is_user_error=True)], []).is_final
    assert not cause([failure(0, 1.0, step=0)], []).is_final


@pytest.mark.parametrize(
    ("error", "message", "may_pass"),
    [
        ("ValueError", "odd", False),
        ("UserError", "the loss is not finite", False),
        ("OSError", "[Errno 28] No space left on device: 'a'", True),
        ("UserError", "runs/a: cannot be written: No space left on device", True),
        ("RuntimeError", "failed writing file: Input/output error", True),
        ("SafetensorError", "Error while serializing", True),
        ("Hang", "rank 1 hangs", True),
    ],
)
def test_what_the_code_raises_again_is_told_from_what_may_pass(error: str, message: str, may_pass: bool) -> None:
    assert cause([failure(0, 1.0, error=error, message=message)], []).may_pass == may_pass


def test_a_death_may_pass_and_a_wrong_command_line_does_not() -> None:
    assert cause([], [end(1, -9)]).may_pass and cause([], [end(1, 1)]).may_pass
    assert not cause([], [end(1, 2)]).may_pass


def test_a_stop_names_the_signal() -> None:
    found = cause([failure(0, 1.0, error="Stopped", message="143")], [end(0, 143)])
    assert found.is_stop and found.code == 128 + signal.SIGTERM
    assert found.text == "the ranks were stopped by SIGTERM after step 7"


def test_an_end_without_a_reason_is_said() -> None:
    assert "ended with exit code 0" in cause([], [end(0, 0)]).text
    assert "was ended by SIGTERM" in cause([], [end(0, 143)]).text
    unknown = first_cause([], [end(3, 2)], {3: Position(rank=3, host="a")}, oom_kills=0)
    assert unknown is not None and unknown.is_final and unknown.text.startswith("rank 3 (a) ended with exit code 2")
    assert first_cause([], [], POSITIONS, oom_kills=0) is None
