"""What the supervisor decides after each attempt: go on, pause, leave a device out, give up, and with which words."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.resilience import supervisor as module
from harness.resilience.cause import Cause, Ended
from harness.resilience.gathering import Team
from harness.resilience.hosts import HostDevices
from harness.resilience.options import read_options
from harness.resilience.script import Start
from harness.resilience.supervisor import Supervisor
from tests.unit.resilience.piped import PipedAgent, host, write_failure, write_position

Supervise = Callable[..., Supervisor]


@pytest.fixture(scope="module")
def team() -> Team:
    """Two ranks on each of two hosts."""
    agents = [PipedAgent(host("a")), PipedAgent(host("b"))]
    return Team(agents=agents, start=Start(words=("mine.py",), ranks=4))


@pytest.fixture
def supervise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Supervise:
    """A supervisor with these flags, which notes its pauses instead of making them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def made(*flags: str, script: tuple[str, ...] = ("mine.py",)) -> Supervisor:
        found = Supervisor(read_options([*flags, *script]), [host()])
        monkeypatch.setattr(module, "wait", lambda seconds, _: pauses.append(seconds))
        return found

    pauses: list[float] = []
    made.pauses = pauses  # type: ignore[attr-defined]
    return made


def fault(step: int, rank: int | None = 1, **more: object) -> Cause:
    return Cause(text=f"it broke in step {step}", step=step, rank=rank, **more)  # type: ignore[arg-type]


def test_a_run_that_ends_well_says_nothing(
    supervise: Supervise, team: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    assert supervise("--max_restarts", "2")._judge(None, team) == 0
    assert capsys.readouterr().err == ""


def test_a_restart_is_said_and_so_is_the_end_after_it(
    supervise: Supervise, team: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    run = supervise("--max_restarts", "2")
    assert [run._judge(fault(7), team), run._judge(fault(9), team), run._judge(None, team)] == [None, None, 0]
    assert [line.removeprefix("ds-harness launch: ") for line in capsys.readouterr().err.splitlines()] == [
        "it broke in step 7",
        "restart 1 of 2",
        "it broke in step 9",
        "restart 2 of 2",
        "done, after 2 restarts",
    ]


def test_without_restarts_the_first_fault_ends_the_run(
    supervise: Supervise, team: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    assert supervise()._judge(fault(7, code=137), team) == 137
    assert capsys.readouterr().err == "ds-harness launch: it broke in step 7\n"


def test_the_faults_are_listed_when_the_restarts_are_used_up(
    supervise: Supervise, team: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    run = supervise("--max_restarts", "1")
    assert run._judge(fault(3), team) is None and run._judge(fault(8, code=9), team) == 9
    assert capsys.readouterr().err.endswith(
        "launch: gave up: 1 restart is used up\n  step 3: it broke in step 3\n  step 8: it broke in step 8\n"
    )


def test_three_faults_in_a_row_at_one_step_are_enough(
    supervise: Supervise, team: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    run = supervise("--max_restarts", "99")
    codes = [run._judge(fault(step), team) for step in (5, 4, 5, 5, 5)]
    assert codes == [None, None, None, None, 1]
    assert supervise.pauses == [0.0, 0.0, 0.0, 2.0]  # type: ignore[attr-defined]
    said = capsys.readouterr().err
    assert "restart 4 of 99 in 2 s" in said and "gave up: 3 faults in a row at step 5" in said


def test_what_may_pass_is_waited_for_longer_each_time(
    supervise: Supervise, team: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full for some minutes must not use up the restarts."""
    run = supervise("--max_restarts", "99")
    codes = [run._judge(fault(5, may_pass=True), team) for _ in range(5)]
    assert codes == [None] * 4 + [1]
    assert supervise.pauses == [0.0, 10.0, 60.0, 300.0]  # type: ignore[attr-defined]
    assert "gave up: 5 faults in a row at step 5" in capsys.readouterr().err


def test_a_folder_for_records_that_cannot_be_made_is_a_fault_that_may_pass(
    supervise: Supervise, tmp_path: Path
) -> None:
    run, agents = supervise("--max_restarts", "2"), [PipedAgent(host("a"))]
    run.root.rmdir()
    run.root.write_text("")  # in the way, as a full disk is
    found = run._attempt(0, Team(agents=list(agents), start=Start(words=("mine.py",), ranks=2)))
    assert found is not None and found.may_pass and "0000: cannot be made: Not a directory" in found.text
    assert agents[0].ends.is_ended


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 2), max_size=8), st.integers(0, 6))
def test_it_gives_up_at_the_right_fault(supervise: Supervise, team: Team, steps: list[int], most: int) -> None:
    run = supervise("--max_restarts", str(most))
    for number, step in enumerate(steps, start=1):
        in_a_row = number >= 3 and len(set(steps[number - 3 : number])) == 1
        assert run._judge(fault(step), team) == (1 if number > most or in_a_row else None)
        if number > most or in_a_row:
            return


def test_what_the_user_must_fix_is_not_tried_again(
    supervise: Supervise, team: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    run = supervise("--max_restarts", "5")
    assert run._judge(fault(0, rank=0, is_final=True), team) == 1
    assert capsys.readouterr().err == ""  # rank 0 has said it itself
    assert run._judge(fault(0, rank=3, is_final=True), team) == 1
    assert "it broke" in capsys.readouterr().err
    assert run._judge(fault(4), team) is None
    assert run._judge(fault(0, is_final=True), team) is None  # it has worked before, so it may again


def test_a_signal_to_the_supervisor_ends_the_run_with_the_cause_s_code(supervise: Supervise, team: Team) -> None:
    run = supervise("--max_restarts", "5")
    run.received.append(15)
    assert run._judge(fault(4, is_stop=True, code=143), team) == 143
    assert run._judge(None, team) == 0  # all work was done meanwhile
    assert run.faults == []


def test_a_stop_for_a_host_that_is_back_is_no_fault(
    supervise: Supervise, team: Team, capsys: pytest.CaptureFixture[str]
) -> None:
    run = supervise("--max_restarts", "1")
    run.is_growing = True
    assert run._judge(fault(4, is_stop=True, code=138), team) is None
    assert run.faults == [] and "a host is back: going on with all hosts that answer" in capsys.readouterr().err
    assert run._judge(fault(4), team) is None  # the ranks failed before they could stop: a fault
    assert len(run.faults) == 1


@pytest.mark.parametrize(
    ("flags", "faults", "left_out"),
    [
        pytest.param(["--min_ranks", "1"], [(0, 3), (0, 3)], {("b", 1)}, id="twice before the first step"),
        pytest.param(["--min_ranks", "1"], [(0, 0), (0, 3)], set(), id="another device"),
        pytest.param(["--min_ranks", "1"], [(0, 3), (1, 3)], set(), id="a step was made"),
        pytest.param(["--min_ranks", "1"], [(0, None), (0, None)], set(), id="no rank failed"),
        pytest.param([], [(0, 3), (0, 3)], set(), id="all ranks are wanted"),
        pytest.param(["--min_ranks", "1"], [(0, 3)], set(), id="once"),
    ],
)
def test_a_device_that_fails_at_once_is_left_out(
    flags: list[str],
    faults: list[tuple[int, int | None]],
    left_out: set[tuple[str, int]],
    supervise: Supervise,
    team: Team,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = supervise("--max_restarts", "9", *flags)
    for step, rank in faults:
        assert run._judge(fault(step, rank), team) is None
    assert run.gathering.failing == left_out
    is_said = "device 1 of b is left out: it failed twice before the first step" in capsys.readouterr().err
    assert is_said == bool(left_out)


def test_each_fault_is_logged_in_the_folder_of_the_run(supervise: Supervise, team: Team, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run = supervise("--max_restarts", "9", script=("scripts/train.py", "--output_dir", str(output)))
    run._judge(fault(0), team)
    assert not output.exists()  # a run that made no folder gets none
    output.mkdir()
    for step in (2, 5):
        run._judge(fault(step), team)
    rows = [json.loads(line) for line in (output / "restarts.jsonl").read_text().splitlines()]
    assert [(row["step"], row["cause"], row["start"]) for row in rows] == [
        (2, "it broke in step 2", "4 ranks"),
        (5, "it broke in step 5", "4 ranks"),
    ]


def ended(rank: int, code: int) -> Ended:
    return Ended(rank=rank, host="b", code=code, time=1.0)


def test_the_cause_is_found_in_the_records(supervise: Supervise, tmp_path: Path) -> None:
    run, records = supervise(), tmp_path / "records"
    for rank in range(2):
        write_position(records, rank, step=6)
    write_failure(records, 1, step=6, time=3.0)
    write_failure(records, 0, step=6, time=2.0, is_lost_peer=True, message="Connection closed by peer")
    found = run._cause(records, [ended(0, 1)], [], 0)
    assert (found.rank, found.text) == (1, "rank 1 (a) failed in step 6: ValueError: wrong")
    (records / "rank-1.json").write_text('{"rank": 1, "ho')  # cut off
    assert run._cause(records, [ended(1, -9)], [], 1).text.endswith("killed by the system: out of memory")


def test_a_host_that_is_lost_is_the_cause_where_its_peers_only_miss_it(supervise: Supervise, tmp_path: Path) -> None:
    run, records = supervise(), tmp_path / "records"
    write_position(records, 0, step=6)
    write_position(records, 1, step=5)
    write_failure(records, 0, is_lost_peer=True)
    found = run._cause(records, [], ["b", "c"], None)
    assert (found.text, found.step, found.rank) == ("no answer from the agent on b, c, in step 6", 6, None)
    assert run._cause(tmp_path / "nothing", [], [], None).text == "no answer from the agent on this host, in step 0"


def test_records_lie_where_all_hosts_see_them(supervise: Supervise, tmp_path: Path) -> None:
    output, away = tmp_path / "run", HostDevices(name="203.0.113.7", devices=(0,))
    assert module._records_root([host()], output).parent == tmp_path and not output.exists()
    assert module._records_root([host(), away], output).parent == output / "logs"
    assert module._records_root([away], None).parent == tmp_path  # a script whose folder is not known


def test_a_run_whose_checkpoints_serve_no_restart_is_refused_before_it_starts(supervise: Supervise) -> None:
    script = ("scripts/train.py", "--save_only_model")
    assert supervise(script=script).script.args is not None
    with pytest.raises(UserError, match="--max_restarts: no run can go on from the checkpoints of --save_only_model"):
        supervise("--max_restarts", "1", script=script)
