"""Groups, process sets and the agreement of ranks, on eight real ranks that one launch gives most tests."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.errors import UserError
from harness.topology.agreement import check_agreement
from harness.topology.groups import build_groups
from harness.topology.layout import AXES, Layout
from harness.topology.process_sets import ProcessSet, ProcessSets
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.ranks

LAYOUT = Layout(pp_size=2, tp_size=2, dp_size=2)
WORLD = LAYOUT.world_size


def told(call: Callable[[], Any]) -> str | None:
    """The text of the UserError that `call` raises, None if it raises none."""
    try:
        call()
    except UserError as error:
        return str(error)
    return None


def tour() -> dict[str, Any]:
    """Everything that one launch can show."""
    groups = build_groups(LAYOUT)
    members = {axis: dist.get_process_group_ranks(groups.along(axis)) for axis in AXES}
    members |= {"world": dist.get_process_group_ranks(groups.world_group)}
    sums = {}
    for axis in AXES:
        number = torch.tensor(2.0**groups.rank)  # a sum of powers of two names its addends
        dist.all_reduce(number, group=groups.along(axis))
        sums[axis] = float(number)
    sets = ProcessSets(groups, timeout_s=20)
    return {
        "members": members,
        "sums": sums,
        "ends": (groups.is_first_stage, groups.is_last_stage),
        "agreement": agreement_of(groups.rank),
        "predefined": {each.name: (each.ranks, each.included()) for each in sets},
        "collectives": collectives(sets["stage:0"]) if sets["stage:0"].included() else None,
        "outsider": told(lambda: sets["stage:0"].barrier()) if not sets["stage:0"].included() else None,
        "dynamic": dynamic(sets, groups.rank),
        "errors": errors(sets, groups.rank),
        "mismatch": mismatch(sets, groups.rank),
    }


def agreement_of(rank: int) -> dict[str, str | None]:
    config, other = {"train_batch_size": 8}, {"train_batch_size": 8, "gradient_clipping": 0.3}
    layout = LAYOUT if rank != 3 else dataclasses.replace(LAYOUT, tp_size=4, dp_size=1)
    return {
        "same": told(lambda: check_agreement(config, LAYOUT)),
        "config": told(lambda: check_agreement(other if rank == 5 else config, LAYOUT)),
        "layout": told(lambda: check_agreement(config, layout)),
        "code": told(lambda: check_agreement(config, LAYOUT, code=f"version {rank >= 4}")),
        "two": told(lambda: check_agreement(other if rank == 0 else config, layout)),
    }


def collectives(some: ProcessSet) -> dict[str, Any]:
    mine = torch.tensor([some.rank(), 10])
    table = torch.arange(some.size() * 2).reshape(some.size(), 2)
    some.barrier()
    return {
        "place": (some.rank(), some.size()),
        "sum": some.all_reduce(mine.clone()).tolist(),
        "max": some.all_reduce(mine.clone(), dist.ReduceOp.MAX).tolist(),
        "gathered": some.all_gather(mine).tolist(),
        "broadcast": some.broadcast(mine.clone(), source=2).tolist(),
        "part": some.reduce_scatter(table).tolist(),
        "bad_source": told(lambda: some.broadcast(mine, source=4)),
        "bad_shape": told(lambda: some.reduce_scatter(mine)),
    }


def dynamic(sets: ProcessSets, rank: int) -> dict[str, Any]:
    odd = sets.add("odd", [7, 1, 3, 5])
    lone = sets.add("lone", [2])
    gathered = odd.all_gather(torch.tensor(rank)).tolist() if odd.included() else None
    place = odd.rank() if odd.included() else None
    alone = lone.all_reduce(torch.tensor(rank)).item() if lone.included() else None
    sets.remove("odd")
    stale = told(odd.barrier)
    again = sets.add("odd", [0, 1])
    return {
        "gathered": gathered,
        "place": place,
        "alone": alone,
        "stale": stale,
        "again": again.all_reduce(torch.tensor(1)).item() if again.included() else None,
        "present": ("odd" in sets, "even" in sets),
    }


def errors(sets: ProcessSets, rank: int) -> dict[str, str | None]:
    return {
        "duplicate": told(lambda: sets.add("odd", [2, 3])),
        "unknown": told(lambda: sets["even"]),
        "remove_unknown": told(lambda: sets.remove("even")),
        "predefined": told(lambda: sets.remove("tensor")),
        "empty": told(lambda: sets.add("none", [])),
        "twice": told(lambda: sets.add("twice", [1, 1])),
        "outside": told(lambda: sets.add("outside", [7, 8])),
    }


def mismatch(sets: ProcessSets, rank: int) -> dict[str, Any]:
    return {
        "ranks": told(lambda: sets.add("some", [0, 1] if rank != 6 else [0, 2])),
        "call": told(lambda: sets.add("some", [0, 1]) if rank < 4 else sets.remove("odd")),
        "nothing_done": ("some" in sets, "odd" in sets),
    }


def forget(silent: int) -> str | None:
    sets = ProcessSets(build_groups(Layout(dp_size=3)), timeout_s=1)
    return None if dist.get_rank() == silent else told(lambda: sets.add("some", [0, 1]))


def wrong_world() -> str | None:
    return told(lambda: build_groups(Layout(dp_size=4)))


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(WORLD, tour)


def test_each_rank_is_in_the_groups_that_the_layout_says(seen: list[dict[str, Any]]) -> None:
    for rank, got in enumerate(seen):
        for axis in AXES:
            expected = LAYOUT.ranks_along(axis, rank)
            assert got["members"][axis] == expected
            assert got["sums"][axis] == sum(2.0**other for other in expected)
        assert got["members"]["world"] == list(range(WORLD))
        assert got["ends"] == (rank < 4, rank >= 4)


def test_ranks_that_agree_go_on_and_ranks_that_differ_are_named(seen: list[dict[str, Any]]) -> None:
    mend = ": give every host the same files and arguments"
    others = "than the other 7 ranks (rank {}, ...)"
    for got in seen:
        assert got["agreement"] == {
            "same": None,
            "config": f"rank 5 has another config {others.format(0)}{mend}",
            "layout": f"rank 3 has another layout {others.format(0)}{mend}",
            "code": f"ranks 4-7 have another code than the other 4 ranks (rank 0, ...){mend}",
            "two": f"rank 0 has another config {others.format(1)}; rank 3 has another layout {others.format(0)}{mend}",
        }


def test_the_layout_predefines_sets(seen: list[dict[str, Any]]) -> None:
    for rank, got in enumerate(seen):
        assert got["predefined"] == {
            "world": (tuple(range(WORLD)), True),
            **{axis: (tuple(LAYOUT.ranks_along(axis, rank)), True) for axis in AXES},
            "stage:0": ((0, 1, 2, 3), rank < 4),
            "stage:1": ((4, 5, 6, 7), rank >= 4),
        }


def test_collectives_stay_within_the_set(seen: list[dict[str, Any]]) -> None:
    for rank in range(4):
        got = seen[rank]["collectives"]
        assert got["place"] == (rank, 4)
        assert got["sum"] == [0 + 1 + 2 + 3, 40]
        assert got["max"] == [3, 10]
        assert got["gathered"] == [[0, 10], [1, 10], [2, 10], [3, 10]]
        assert got["broadcast"] == [2, 10]
        assert got["part"] == [4 * 2 * rank, 4 * (2 * rank + 1)]
        assert "source 4 is outside the 4 ranks" in got["bad_source"]
        assert "needs a first dim of 4, got shape [2]" in got["bad_shape"]
    for rank in range(4, 8):
        assert seen[rank]["outsider"] == (
            f"process set 'stage:0' (ranks 0-3) does not include rank {rank}: check included() first"
        )


def test_sets_come_and_go_while_running(seen: list[dict[str, Any]]) -> None:
    for rank, got in enumerate(each["dynamic"] for each in seen):
        assert got["gathered"] == ([1, 3, 5, 7] if rank % 2 else None)
        assert got["place"] == (rank // 2 if rank % 2 else None)
        assert got["alone"] == (2 if rank == 2 else None)
        assert got["again"] == (2 if rank < 2 else None)
        assert "was removed" in got["stale"]
        assert got["present"] == (True, False)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("duplicate", "there is already a process set 'odd' (ranks 0-1)"),
        (
            "unknown",
            "no process set 'even': there are world, pipeline, data, tensor, stage:0, stage:1, lone, odd",
        ),
        ("remove_unknown", "no process set 'even'"),
        ("predefined", "belongs to the layout"),
        ("empty", "process set 'none' cannot have ranks []"),
        ("twice", "process set 'twice' cannot have ranks [1, 1]"),
        ("outside", "give at least one, each once, each from 0 to 7"),
    ],
)
def test_a_wrong_call_is_told_on_every_rank(seen: list[dict[str, Any]], case: str, text: str) -> None:
    assert all(text in got["errors"][case] for got in seen)


def test_ranks_that_call_differently_are_told_and_nothing_is_done(seen: list[dict[str, Any]]) -> None:
    for got in seen:
        assert got["mismatch"] == {
            "ranks": "rank 6 has another call on the process sets than the other 7 ranks (rank 0, ...): "
            "ranks 0-5, 7 add('some', [0, 1]); rank 6 add('some', [0, 2])",
            "call": "ranks 4-7 have another call on the process sets than the other 4 ranks (rank 0, ...): "
            "ranks 0-3 add('some', [0, 1]); ranks 4-7 remove('odd')",
            "nothing_done": (False, True),
        }


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_never_calls_is_named_instead_of_waited_for(silent: int) -> None:
    texts = run_ranks(3, forget, silent, timeout_s=30)
    assert texts.pop(silent) is None
    assert all("not every rank called add('some', [0, 1]) within 1 s: " in text for text in texts)
    assert re.search(rf"\branks? {silent}\b", texts[0], re.IGNORECASE), texts[0]


def test_a_layout_for_another_world_is_refused() -> None:
    for text in run_ranks(2, wrong_world):
        assert "layout pp1 x dp4 x tp1 is for 4 ranks, but 2 are running" in text
