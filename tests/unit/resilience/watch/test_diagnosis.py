"""Who is named when ranks stop making progress, by the pure rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.resilience.process.activity import BEATS_OF_STEP, Phase
from harness.resilience.watch.board import VERDICT
from harness.resilience.watch.diagnosis import LONGEST, Diagnosis, RankStatus, diagnose
from harness.resilience.watch.stragglers import slowest_rank
from harness.resilience.watch.watcher import SLOW_S, Limits
from tests.unit.resilience.watch.statuses import rank_status


def culprit(*statuses: RankStatus) -> int | None:
    verdict = diagnose(statuses)
    return None if verdict is None else verdict.culprit


def test_ranks_that_make_progress_are_left_alone() -> None:
    assert culprit(rank_status(0), rank_status(1)) is None
    assert culprit(rank_status(0, still=99), rank_status(1)) is None  # it waits for one that works
    assert (
        culprit(rank_status(0, still=99), rank_status(1, still=99, phase=Phase.SLOW, limit=600.0, waits=False)) is None
    )
    assert culprit(rank_status(0, still=99, limit=0.0), rank_status(1, still=99, limit=0.0)) is None  # not looked for


@pytest.mark.parametrize(
    "stuck",
    [{"state": "T"}, {"waits": False, "place": "data.py:3 in __getitem__"}, {"unwatched": 9.0}],
    ids=["stopped", "its own code", "holds Python's lock"],
)
def test_of_ranks_that_hang_the_one_that_does_not_wait_is_named(stuck: dict[str, Any]) -> None:
    verdict = diagnose([rank_status(0, still=31), rank_status(1, still=33, **stuck), rank_status(2, still=31)])
    assert verdict is not None and (verdict.error, verdict.culprit, verdict.step) == ("Hang", 1, 7)
    assert "rank 1 (stage 1, host a) hangs in step 7, during: RecvGrad(1)" in verdict.message
    assert "waits for it (RecvGrad(0), recv), and 1 more" in verdict.message
    assert Diagnosis.load(verdict.dump()) == replace(verdict, message=verdict.message[:LONGEST])
    assert len(replace(verdict, message="é" * 9999).dump()) < VERDICT


def test_nothing_hangs_where_nobody_waits() -> None:
    alone = rank_status(0, still=9999, waits=False)
    assert diagnose([alone]) is None
    ended = rank_status(1, still=9999, phase=Phase.OUTSIDE, state="", waits=False, limit=0.0)
    assert diagnose([alone, replace(ended, state="S", limit=600.0)]) is None  # it is in code that comes after the run
    assert culprit(replace(alone, waits=True), replace(ended, state="S", limit=600.0)) == 1


def test_where_no_rank_is_seen_to_wait_the_one_that_is_behind_its_stage_is_named() -> None:
    """As with collectives that return at once."""

    def stuck(rank: int, stage: int, beats: int, **more: Any) -> RankStatus:
        own = {"waits": False, "place": f"engine.py:{beats}", "beats": 7 * BEATS_OF_STEP + beats, **more}
        return rank_status(rank, stage=stage, still=31, **own)

    assert culprit(stuck(0, 0, 9), stuck(1, 0, 9), stuck(2, 0, 4)) == 2
    assert culprit(stuck(0, 0, 9), stuck(1, 0, 9), stuck(2, 1, 4), stuck(3, 1, 4)) == -1  # stages do other things
    reading = stuck(1, 0, 99 - BEATS_OF_STEP, phase=Phase.SLOW)
    assert culprit(stuck(0, 0, 9), reading) == 1
    after = {"phase": Phase.SLOW}
    assert culprit(stuck(0, 0, 12, **after), stuck(1, 0, 11, **after)) == -1  # callbacks differ
    verdict = diagnose([stuck(0, 0, 9), stuck(1, 0, 9)])
    assert verdict is not None and verdict.message == "all ranks hang in step 7: ranks 0-1 in engine.py:9"


def test_a_stopped_rank_is_named_while_others_still_work() -> None:
    assert culprit(rank_status(0, phase=Phase.SLOW, waits=False, limit=600.0), rank_status(1, state="T", still=31)) == 1
    assert culprit(rank_status(0), rank_status(1, state="T", still=29)) is None


def test_ranks_that_all_wait_are_a_deadlock_without_a_culprit() -> None:
    verdict = diagnose([rank_status(0, still=31), rank_status(1, still=31, place="all_reduce")])
    assert verdict is not None and verdict.culprit == -1
    assert "rank 0 in recv, rank 1 in all_reduce" in verdict.message


def test_a_rank_that_has_ended_is_named_at_once_unless_it_ended_as_it_should_or_said_why() -> None:
    gone = rank_status(1, state="Z", ending="ended by SIGKILL")
    assert culprit(rank_status(0), gone) == 1
    assert culprit(rank_status(0, phase=Phase.LOST), gone) == 1
    for phase in (Phase.OUTSIDE, Phase.FAILED, Phase.LOST):
        for still, named in ((1, None), (11, 1)):  # later, if another one still waits for it
            assert culprit(rank_status(0, still=still), rank_status(1, state="", phase=phase, still=still)) == named
    left = rank_status(1, state="", phase=Phase.OUTSIDE)
    assert culprit(rank_status(0, phase=Phase.LOST), left) == 1  # at once: another one has lost it
    outside = rank_status(0, phase=Phase.OUTSIDE, still=99)
    assert culprit(outside, rank_status(1, state="", phase=Phase.OUTSIDE, still=99)) is None


def test_a_silent_host_is_named_sooner_where_a_connection_was_lost() -> None:
    far = [rank_status(rank, host="b", silent=8.0, still=8.0) for rank in (1, 2)]
    assert culprit(rank_status(0), *far) is None
    verdict = diagnose([rank_status(0, phase=Phase.LOST), *far])
    assert verdict is not None and (verdict.error, verdict.culprit) == ("Silent", 1)
    assert "host b has not answered for 8 s: ranks 1-2 in step 7" in verdict.message


def test_limits() -> None:
    limits = Limits(hang=30.0, longest=1440.0)
    assert limits.of(Phase.STEP, 1.0) == 30.0
    assert limits.of(Phase.STEP, 20.0) == 100.0
    assert limits.of(Phase.STEP, None) == limits.of(Phase.SLOW, 1.0) == SLOW_S
    assert limits.of(Phase.STEP, 1e6) == 1440.0  # a collective's timeout would come next
    assert Limits(hang=0.0, longest=1440.0).of(Phase.STEP, 1.0) == 0.0


def test_a_straggler_works_much_longer_than_its_peers_and_than_its_stage_explains() -> None:
    def slowest(works: list[float], costs: list[float]) -> int | None:
        found, _ = slowest_rank([rank_status(rank, work=work) for rank, work in enumerate(works)], costs)
        return None if found is None else found.rank

    assert slowest([0.9, 0.45], [1.0, 1.0]) == 0
    assert slowest([0.9, 0.45], [2.0, 1.0]) is None  # it has twice the layers
    assert slowest([0.9, 0.45], []) == 0
    assert slowest([0.8, 0.9], [1.0, 1.0]) is None
    assert slowest([0.05, 0.4, 0.05], []) is None  # all wait most of the time
