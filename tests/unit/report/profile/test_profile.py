"""What follows from a profile: waits, the bubble, times by layer, a trace; and files that are read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.values.batch import bubble as idle_share
from harness.config.values.step_time import pipeline_seconds
from harness.report.profile.record import FOLDER, Span, read_steps, write_step
from harness.report.profile.summary import largest_of_stage, summary
from harness.report.profile.timeline import bubble, trace, with_gaps, with_waits
from harness.schedules import SCHEDULES
from tests.unit.report.profile.made import MEMORY, profile, several_chunks


@pytest.mark.parametrize(
    ("micro_batches", "schedule", "seconds"), [(1, "1f1b", 6.0), (4, "1f1b", 15.0), (4, "zero-bubble", 13.0)]
)
def test_a_step_takes_all_stages_once_and_the_slowest_for_every_other_micro_batch(
    micro_batches: int, schedule: str, seconds: float
) -> None:
    assert pipeline_seconds([1.0, 2.0, 3.0], micro_batches, schedule) == seconds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_wait_as_the_schedule_s_formula_says(schedule: str) -> None:
    for stages, micro_batches in ((1, 3), (2, 1), (4, 3), (4, 16)):
        seconds = pipeline_seconds([2.0] * stages, micro_batches, schedule)
        assert 1 - micro_batches * 2.0 / seconds == pytest.approx(idle_share(stages, micro_batches, schedule))


@pytest.mark.parametrize(
    ("changes", "spans"),
    [
        pytest.param({"start": 0, "end": 9}, [(0, 1), (1, 3), (3, 4), (4, 8), (8, 9)], id="before, between and after"),
        pytest.param({"start": 1, "end": 8}, [(1, 3), (3, 4), (4, 8)], id="between alone"),
    ],
)
def test_what_lies_between_instructions_is_other(changes: dict[str, float], spans: list[tuple[float, float]]) -> None:
    own = [Span(kind="forward", name="a", start=1, end=3), Span(kind="step", name="b", start=4, end=8)]
    found = list(with_gaps(own, **changes))
    assert [(span.start, span.end) for span in found] == spans
    assert [span.kind for span in found if span not in own] == ["other"] * (len(spans) - 2)


def test_spans_within_one_another_leave_no_gap_behind_the_inner_one() -> None:
    outer, inner = Span(kind="forward", name="a", start=0, end=5), Span(kind="wait", name="b", start=1, end=2)
    assert list(with_gaps([outer, inner], 0, 5)) == [outer, inner]
    assert [span.name for span in with_gaps([], 0, 5)] == ["after the last instruction"]


@pytest.mark.parametrize(
    ("stages", "computing"),
    [pytest.param(1, True, id="no pipeline"), pytest.param(2, False, id="a rank that computed nothing")],
)
def test_there_is_no_bubble_where_nothing_waits_or_nothing_computes(stages: int, computing: bool) -> None:
    made = profile()
    ranks = [rank if computing else replace(rank, instructions=[]) for rank in made.ranks]
    assert bubble(replace(made, stage_boundaries=[0, 2] if stages == 1 else [0, 1, 2], ranks=ranks)) is None


def test_chunks_of_a_stage_wait_for_other_stages_alone() -> None:
    (_, first), (_, second) = with_waits(several_chunks())
    assert [(s.kind, s.name, s.chunk, s.start, s.end) for s in (*first, *second) if s.kind in ("wait", "receive")] == [
        ("wait", "RecvActivation", 3, 1.1, 3.3),
        ("receive", "RecvActivation", 3, 3.3, 3.5),
        ("wait", "RecvGrad", 0, 6.6, 10.8),
        ("receive", "RecvGrad", 0, 10.8, 11.0),
        ("wait", "RecvActivation", 1, 0.5, 1.0),
        ("receive", "RecvActivation", 1, 1.0, 1.2),
        ("receive", "RecvActivation", 2, 2.25, 2.3),
        ("wait", "RecvGrad", 2, 3.4, 6.5),
        ("receive", "RecvGrad", 2, 6.5, 6.7),
        ("receive", "RecvGrad", 1, 8.75, 8.8),
    ]
    events = trace([several_chunks()])["traceEvents"]
    assert len([event for event in events if event["ph"] == "s"]) == 6
    assert "waits for SendGrad, chunk 2" in {event["name"] for event in events}


def test_the_summary_of_stages_with_several_chunks_says_what_each_chunk_takes() -> None:
    found = summary([several_chunks()])
    parts = [[(chunk["chunk"], chunk["layers"]) for chunk in stage["chunks"]] for stage in found["stages"]]
    assert parts == [[(0, [0, 0]), (3, [4, 4])], [(1, [1, 1]), (2, [2, 3])]]
    assert [layer["stage"] for layer in found["layers"]] == [0, 1, 1, 1, 0]
    first = found["stages"][0]
    assert "layers" not in first and first["forward_seconds_per_micro_batch"] == 2.0  # both parts
    assert [part["backward_seconds_per_micro_batch"] for part in first["chunks"]] == [2.0, 2.0]
    # the stages compute 6 s each; with one micro-batch they wait as under 1F1B with one part
    assert found["bubble"]["measured"] == pytest.approx(1 - 6 / 13)
    assert found["bubble"]["balanced"] == pytest.approx(idle_share(2, 1, "zero-bubble-v", 2))
    assert found["bubble"]["unequal"] == pytest.approx(found["bubble"]["balanced"])


def test_a_message_whose_other_side_is_not_there_is_left_whole() -> None:
    made = profile()
    first, second = made.ranks
    cut = replace(second, instructions=[span for span in second.instructions if span.name != "SendGrad"])
    (_, spans), _ = with_waits(replace(made, ranks=[first, cut]))
    assert [span.kind for span in spans if span.name == "RecvGrad"] == ["receive", "receive"]
    arrows = [e for e in trace([replace(made, ranks=[first, cut])])["traceEvents"] if e["ph"] in "sf"]
    assert {event["name"] for event in arrows} == {"SendActivation"}


def test_times_are_counted_from_any_moment() -> None:
    rank = profile().ranks[0]
    moved = rank.since(0.25)
    assert (moved.start, moved.end) == (rank.start - 0.25, rank.end - 0.25)
    assert [span.seconds for span in moved.instructions] == pytest.approx([span.seconds for span in rank.instructions])
    assert moved.layers[0].start == rank.layers[0].start - 0.25
    assert moved.since(-0.25) == rank


def test_the_rank_that_needs_most_stands_for_its_stage() -> None:
    made = profile()
    other = replace(made.ranks[0], rank=7, dp_rank=1, memory_bytes={"peak": 99})
    unmeasured = replace(made.ranks[0], rank=8, dp_rank=2, memory_bytes={})
    found = largest_of_stage(replace(made, ranks=[*made.ranks, unmeasured, other]), 0)
    assert found.rank == 7


def test_a_run_without_a_pipeline_has_no_bubble_in_its_summary() -> None:
    made = replace(profile(), stage_boundaries=[0, 2], ranks=[profile().ranks[0]])
    found = summary([made])
    assert found["bubble"] is None and [stage["layers"] for stage in found["stages"]] == [[0, 1]]


def test_a_message_is_a_wait_until_the_other_side_begins_and_then_a_transfer() -> None:
    (_, first), (_, second) = with_waits(profile())
    assert [(s.kind, s.start, s.end) for s in first if s.name == "RecvGrad"] == [
        ("wait", 2.6, 5.6),
        ("receive", 5.6, 5.7),
        ("wait", 6.8, 9.8),
        ("receive", 9.8, 10.0),
    ]
    # the second activation is received from 5.7 on, so its sender, which is busy until 6.7, is what it waits for
    assert [(s.kind, s.start, s.end) for s in second if s.name == "RecvActivation"] == [
        ("wait", 0.25, 1.5),
        ("receive", 1.5, 1.6),
        ("wait", 5.7, 6.7),
        ("receive", 6.7, 6.8),
    ]
    assert [s.kind for s in first if s.name == "SendActivation"] == ["send", "send"]


def test_the_bubble_is_what_stages_do_not_compute_between_the_first_forward_and_the_last_backward() -> None:
    found = bubble(profile())
    assert found is not None
    assert found.measured == pytest.approx(1 - (4.0 + 7.0) / 2 / 10.5)
    assert found.balanced == pytest.approx(1 / 3)
    # a micro-batch takes 2 s on the first stage and 3.5 s on the second
    assert found.unequal == pytest.approx(1 - (4.0 + 7.0) / 2 / (2.0 + 3.5 + 3.5))


def test_the_summary_adds_up_what_was_interrupted_and_leaves_no_second_out() -> None:
    found = summary([profile(3), profile(4)])
    layer = found["layers"][0]
    assert (layer["stage"], layer["recompute_seconds_per_micro_batch"]) == (0, 0.5)
    assert layer["backward_seconds_per_micro_batch"] == pytest.approx(0.5)
    assert found["layers"][1]["forward_seconds_per_micro_batch"] is None
    assert sum(found["seconds_by_kind"].values()) == pytest.approx((11.5 + 11.0) / 2)
    assert found["steps"] == [3, 4] and found["step_seconds"] == 11.5
    assert [stage["memory_bytes"] for stage in found["stages"]] == [MEMORY, MEMORY]
    assert found["stages"][1]["backward_seconds_per_micro_batch"] == pytest.approx(1.9)


def test_a_trace_has_each_instruction_on_its_rank_and_an_arrow_for_each_message() -> None:
    events = trace([profile(3), profile(4)])["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert {event["name"] for event in slices} >= {"step 3", "step 4", "ForwardPass", "waits for SendGrad"}
    second = next(event for event in slices if event["name"] == "step 4")
    assert second["ts"] == pytest.approx((11.5 + 0.01) * 1e6)
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in slices)
    starts = [event for event in events if event["ph"] == "s"]
    assert len(starts) == 8 == len([event for event in events if event["ph"] == "f"])
    for start in starts:  # within the slice of its send
        around = [e for e in slices if e["pid"] == start["pid"] and e["ts"] <= start["ts"] <= e["ts"] + e["dur"]]
        assert start["name"] in {event["name"] for event in around}


def test_steps_are_read_back_and_what_is_broken_or_of_another_run_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    for made in (profile(4), profile(3), profile(5, "other")):
        write_step(folder, made)
    (folder / "step-00000006.json").write_text((folder / "step-00000003.json").read_text()[:100])
    (folder / "step-00000007.json").write_text(json.dumps({"step": 7}))
    assert [found.step for found in read_steps(tmp_path, "run")] == [3, 4]
    read = next(read_steps(tmp_path))
    assert read.ranks[0].instructions[1].end == 1.6 and bubble(read) == bubble(profile(3))
    assert list(read_steps(tmp_path / "nothing")) == []
