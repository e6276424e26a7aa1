"""The page that ranks of one host share: each row by itself, texts cut and never mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.resilience.process.activity import SHOWN, Phase
from harness.resilience.watch.board import ROW, VERDICT, WATCHER, Board
from harness.resilience.watch.diagnosis import LONGEST, Diagnosis

few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
seconds = st.floats(0, 1e9)
texts = st.text(alphabet="aé日🙂 ()/:.", max_size=60)
rows = st.fixed_dictionaries(
    {
        "beat_at": seconds,
        "beats": st.integers(0, 2**63 - 1),
        "phase": st.sampled_from(Phase),
        "step": st.integers(0, 2**31 - 1),
        "doing": texts,
        "looked_at": seconds,
        "limit": seconds,
        "waits": st.booleans(),
        "work": st.floats(-1, 1),
        "ready": st.booleans(),
        "place": texts,
    }
)


def write(board: Board, row: int, values: dict[str, Any]) -> None:
    named = {name: value.encode() if isinstance(value, str) else value for name, value in values.items()}
    SHOWN.pack_into(board.row(row), 0, *(named[name] for name in ("beat_at", "beats", "phase", "step", "doing")))
    board.watch(row, *(named[name] for name in ("looked_at", "limit", "waits", "work", "ready", "place")))


def seen(board: Board, row: int) -> dict[str, Any]:
    return board.read(row)._asdict()


def kept(text: str, size: int) -> str:
    """As much of a text as there is room for, and a sign where a character was cut."""
    return text.encode()[:size].decode(errors="replace")


@given(st.lists(rows, min_size=1, max_size=4), st.data())
@few
def test_every_rank_reads_what_each_has_written(
    tmp_path: Path, written: list[dict[str, Any]], data: st.DataObject
) -> None:
    (tmp_path / "board").unlink(missing_ok=True)
    mine, theirs = (Board(tmp_path / "board", len(written)) for _ in range(2))
    for row in data.draw(st.permutations(range(len(written)))):
        write(data.draw(st.sampled_from([mine, theirs])), row, written[row])
    for row, values in enumerate(written):
        wanted = {**values, "doing": kept(values["doing"], 64), "place": kept(values["place"], 96)}
        assert seen(mine, row) == seen(theirs, row) == wanted
    assert mine.verdict == ""


def test_a_row_has_room_for_both_that_write_it_and_a_page_is_empty_at_first(tmp_path: Path) -> None:
    assert SHOWN.size + WATCHER.size <= ROW
    board = Board(tmp_path / "board", 2)
    row = board.read(1)
    assert (row.beats, row.phase, row.doing, row.place, row.ready) == (0, Phase.OUTSIDE, "", "", False)
    assert (tmp_path / "board").stat().st_size == VERDICT + 2 * ROW
    assert (tmp_path / "board").stat().st_mode & 0o077 == 0  # other users read nothing


@pytest.mark.parametrize(
    ("first", "second"),
    [("a longer verdict", "short"), ("short", "a longer verdict"), ("a", ""), ("é" * 2000, "日")],
)
def test_of_two_verdicts_the_second_stands_alone(first: str, second: str, tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 1)
    write(board, 0, {**dict.fromkeys(seen(board, 0), 0), "doing": "a", "place": "b"})
    for text in (first, second):
        board.verdict = text
    assert board.verdict == second
    assert board.read(0).doing == "a"


@pytest.mark.parametrize("character", ["a", "é", "日", "🙂", "\\", '"', "\n", "\x01", "\udce9"])
def test_a_verdict_of_any_letters_reaches_the_other_ranks_whole(character: str, tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 1)
    verdict = Diagnosis(error="Hang", culprit=2**31, step=10**9, message=character * 1000)
    board.verdict = verdict.dump()
    found = Diagnosis.load(board.verdict)
    assert (found.error, found.culprit, found.step) == ("Hang", 2**31, 10**9)
    assert found.message == ("?" if character == "\udce9" else character) * LONGEST
    assert json.loads(verdict.dump())["message"] == character * LONGEST
