"""Who has left a call out, by what each rank has enqueued."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.resilience.process.activity import BEATS_OF_STEP, Phase
from harness.resilience.watch.diagnosis import RankStatus
from harness.resilience.watch.enqueued import Enqueued, left_out

SOMEWHERE = RankStatus(
    rank=0,
    stage=0,
    host="a",
    pid=1,
    phase=Phase.STEP,
    step=3,
    beats=3 * BEATS_OF_STEP + 9,
    doing="optimizer step",
    still=9.0,
    unwatched=0.0,
    silent=0.0,
    limit=5.0,
    state="S",
    ending="",
    waits=True,
    place="the device",
    work=0.5,
)


def at(rank: int, **changes: Any) -> RankStatus:
    return replace(SOMEWHERE, rank=rank, **changes)


def calls(members: list[int], **count: int) -> Enqueued:
    return Enqueued(calls=dict(count), members=dict.fromkeys(count, members))


def test_the_rank_with_fewer_calls_of_a_group_is_named() -> None:
    found = {rank: calls([0, 1, 2], dp=7 if rank == 1 else 8) for rank in range(3)}
    named = left_out(found, [at(rank) for rank in range(3)])
    assert named == (1, "has begun 7 collectives of the group of ranks 0-2, ranks 0, 2 8")


def test_nobody_is_named_where_all_have_made_the_same_calls() -> None:
    found = {rank: calls([0, 1], dp=8, tp=3) for rank in range(2)}
    assert left_out(found, [at(0), at(1)]) is None


def test_a_rank_that_waits_for_what_was_left_out_is_not_named() -> None:
    # rank 1 has left out a call of tp and gone on to one of dp, which rank 0 has not come to
    found = {0: calls([0, 1], tp=5, dp=6), 1: calls([0, 1], tp=4, dp=7)}
    statuses = [at(0), at(1, beats=3 * BEATS_OF_STEP + 20)]
    assert left_out(found, statuses) == (1, "has begun 4 collectives of the group of ranks 0-1, rank 0 5")


def test_a_stage_that_has_sent_less_than_its_neighbour_receives_is_named() -> None:
    found = {0: Enqueued(sent={1: 3}, received={1: 4}), 1: Enqueued(sent={0: 4}, received={0: 4})}
    assert left_out(found, [at(0), at(1, stage=1)]) == (
        0,
        "has sent 3 of the 4 tensors that rank 1 receives from it",
    )


def test_a_stage_that_has_received_less_than_its_neighbour_has_sent_is_named() -> None:
    found = {0: Enqueued(sent={1: 4}, received={1: 4}), 1: Enqueued(sent={0: 4}, received={0: 3})}
    assert left_out(found, [at(0), at(1, stage=1)]) == (1, "receives 3 of the 4 tensors that rank 0 has sent to it")
