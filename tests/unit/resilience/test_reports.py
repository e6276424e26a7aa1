"""When a start is over, by the ranks of one host, and what the cause was, by the reports of all."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from harness.resilience.on_host.ranks import Exit
from harness.resilience.process.records import EXPECTED, SUCCESS, Position
from harness.resilience.reports import DONE_S, REPORT_S, Report, cause_of, have_reported, why_over
from harness.resilience.team import Team
from tests.unit.resilience.simulated import write_failure
from tests.unit.resilience.test_team import offer

SOON, AT_LAST = REPORT_S / 2, DONE_S + 1


@pytest.mark.parametrize(
    ("codes", "records", "why", "told_soon", "told_later"),
    [
        pytest.param({}, {}, "", False, True, id="all run"),
        pytest.param({0: 0, 1: 0}, {}, "finished", True, True, id="all have ended"),
        pytest.param({0: 1, 1: -9}, {}, "fault", True, True, id="all have ended badly"),
        pytest.param({1: 0}, {}, "", False, True, id="one has ended well: the others may take as long as they like"),
        pytest.param({0: 1}, {}, "fault", False, True, id="one has died: the others say why"),
        pytest.param({}, {1: {}}, "fault", False, True, id="one has recorded a failure"),
        pytest.param({}, {0: {}, 1: {}}, "fault", True, True, id="all have recorded failures"),
        pytest.param({0: 1}, {1: {}}, "fault", True, True, id="each rank has ended or said why"),
        pytest.param({}, {0: {"is_user_error": True}, 1: {}}, "fault", False, True, id="a message is being printed"),
        pytest.param({0: 143}, {0: {"error": "Stopped"}}, "stop", False, False, id="a stop: the others save too"),
        pytest.param({0: 143}, {0: {"error": "Stopped"}, 1: {}}, "fault", True, True, id="a stop and a failure"),
    ],
)
def test_when_a_start_of_two_ranks_is_over(
    codes: dict[int, int],
    records: dict[int, dict[str, Any]],
    why: str,
    told_soon: bool,
    told_later: bool,
    tmp_path: Path,
) -> None:
    exits = [Exit(rank, code, 1.0) for rank, code in codes.items()]
    for rank, more in records.items():
        write_failure(tmp_path, rank, **more)
    assert why_over(tmp_path, exits, 2) == why
    reason = why if why in ("fault", "stop", "done") else "fault"
    assert have_reported(tmp_path, exits, 2, reason, SOON) == told_soon
    assert have_reported(tmp_path, exits, 2, reason, REPORT_S + 1) == told_later
    assert have_reported(tmp_path, exits, 2, reason, AT_LAST)


def test_all_work_is_done_when_rank_0_says_so_and_a_host_without_ranks_ends_nothing(tmp_path: Path) -> None:
    assert why_over(tmp_path, [], 0) == "" and have_reported(tmp_path, [], 0, "done", 0)
    (tmp_path / SUCCESS).write_text("{}")
    assert why_over(tmp_path, [Exit(0, 0, 1.0)], 2) == "done"
    assert not have_reported(tmp_path, [Exit(0, 0, 1.0)], 2, "done", REPORT_S + 1)


def report(folder: Path, *exits: tuple[int, int, float], received: tuple[int, ...] = ()) -> Report:
    found, as_json = Report.of(folder, [Exit(*each) for each in exits], 0.0, None, received), TypeAdapter(Report)
    return as_json.validate_json(as_json.dump_json(found))  # as another host reads it


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The records of two hosts of two ranks each, in step 6."""
    found = [tmp_path / name for name in ("a", "b")]
    for index, folder in enumerate(found):
        folder.mkdir()
        for rank in (2 * index, 2 * index + 1):
            position = Position(rank=rank, host=folder.name, stage=0, step=6, doing="training")
            (folder / f"position-{rank}.json").write_text(json.dumps(asdict(position)))
    return found


TEAM = Team(offers=(offer("a"), offer("b")))


def cause(reports: list[Report], lost: set[str] | None = None, text: str = "") -> Any:
    return cause_of(TEAM, dict(enumerate(reports)), lost or set(), text, 4)


def test_the_cause_is_found_in_the_records_of_all_hosts(folders: list[Path]) -> None:
    write_failure(folders[1], 3, time=3.0, step=6, host="b")
    write_failure(folders[0], 0, time=2.0, is_lost_peer=True, message="Connection closed by peer")
    found = cause([report(folders[0], (0, 1, 4.0)), report(folders[1])])
    assert (found.rank, found.text) == (3, "rank 3 (b) failed in step 6: ValueError: wrong")
    (folders[1] / "rank-3.json").write_text('{"rank": 3, "ho')  # cut off
    killed = cause([report(folders[0]), report(folders[1], (3, -9, 1.0))])
    assert killed.text.startswith("rank 3 (b, stage 0) was killed by SIGKILL in step 6") and killed.may_pass


def test_a_host_that_is_lost_is_the_cause_where_its_peers_only_miss_it(folders: list[Path]) -> None:
    write_failure(folders[0], 0, is_lost_peer=True)
    found = cause([report(folders[0], (0, 1, 1.0))], lost={"b_1_0"})
    assert (found.text, found.step, found.rank) == ("no answer from the agent on b, in step 6", 6, None)
    assert cause([], lost={"a_1_0", "b_1_0"}).text == "no answer from the agent on a, b, in step 4"
    write_failure(folders[0], 1, error="Silent", message="host b has not answered")
    assert "host b has not answered" in cause([report(folders[0], (0, 1, 1.0))], lost={"b_1_0"}).text


def test_what_an_agent_cannot_do_is_the_cause(folders: list[Path]) -> None:
    found = cause([report(folders[0])], text="/tmp/0001: cannot be made: No space left on device")
    assert found.may_pass and found.step == 6 and found.text.startswith("/tmp/0001")


def test_success_is_what_rank_0_says_or_exit_codes_of_programs_that_do_not_say_it(folders: list[Path]) -> None:
    done = [report(folders[0], (0, 0, 1.0), (1, 0, 1.0)), report(folders[1], (2, 0, 1.0), (3, 0, 1.0))]
    assert cause(done) is None
    (folders[0] / EXPECTED).write_text("{}")
    said_nothing = [report(folders[0], (0, 0, 1.0), (1, 0, 1.0)), done[1]]
    assert "ended with exit code 0 without a recorded error, before the run was complete" in cause(said_nothing).text
    (folders[0] / SUCCESS).write_text("{}")
    assert cause([report(folders[0], (0, 0, 1.0)), report(folders[1], (3, -9, 1.0))]) is None
