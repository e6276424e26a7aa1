"""One process under its own watch: what its row shows, and where it stands."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.resilience.process.activity import ACTIVITY, SHOWN, Activity, Phase, beat, inside
from harness.resilience.process.records import THIS_RANK
from harness.resilience.watch.board import Board
from harness.resilience.watch.ending import main_frame, stacks
from harness.training.engine.build import announce_layers


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """A board whose second row this process shows itself in."""
    return Board(tmp_path / "board", 2)


def test_a_row_holds_what_was_written_and_a_verdict_is_whole(board: Board) -> None:
    SHOWN.pack_into(board.row(1), 0, 3.5, 7, Phase.SLOW, 12, "é".encode() * 40)
    board.watch(1, 4.5, 30.0, True, 0.25, False, b"all_reduce")
    row = board.read(1)
    assert (row.beat_at, row.beats, row.phase, row.step, row.doing[:3]) == (3.5, 7, Phase.SLOW, 12, "ééé")
    assert (row.looked_at, row.limit, row.waits, row.work, row.ready, row.place) == (
        4.5,
        30.0,
        True,
        0.25,
        False,
        "all_reduce",
    )
    assert board.read(0).beat_at == 0.0 and board.verdict == ""
    board.verdict = "x" * 5000
    assert set(board.verdict) == {"x"} and board.read(0).beat_at == 0.0


def test_phases_nest_and_only_the_outermost_shows_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[Phase, str]] = []
    monkeypatch.setattr(Activity, "show", lambda own: shown.append((own.phase, THIS_RANK.doing)))
    monkeypatch.setattr(ACTIVITY, "phase", Phase.OUTSIDE)
    with pytest.raises(ValueError, match="own"), inside("training", Phase.STEP):
        with inside("saving"):
            beat("writing")
        with pytest.raises(OSError), inside("saving"):
            raise OSError
        assert ACTIVITY.phase is Phase.STEP
        raise ValueError("own")
    assert shown[:4] == [
        (Phase.STEP, "training"),
        (Phase.SLOW, "saving"),
        (Phase.SLOW, "writing"),
        (Phase.STEP, "training"),
    ]
    assert ACTIVITY.phase is Phase.FAILED
    with pytest.raises(RuntimeError), inside("training", Phase.STEP):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    assert ACTIVITY.phase is Phase.FAILED  # what it inherited


def test_the_main_thread_is_seen_where_it_stands() -> None:
    found: list[object] = []

    def look() -> None:
        time.sleep(0.05)
        found.extend([main_frame(), stacks()])

    thread = threading.Thread(target=look)
    thread.start()
    while not found:
        pass
    thread.join()
    place, text = found
    assert not place.waits  # type: ignore[attr-defined]
    assert "test_watcher.py" in place.text and "test_the_main_thread" in place.text  # type: ignore[attr-defined]
    assert "test_the_main_thread" in str(text) and "in look" in str(text)


def test_each_layer_shows_its_forward_and_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Activity, "show", lambda _: shown.append(THIS_RANK.doing))
    layers = [nn.Linear(2, 2), torch.relu, nn.Linear(2, 1)]  # a function has no hooks
    announce_layers(layers)
    value = torch.ones(1, 2)
    for layer in layers:
        value = layer(value)
    value.sum().backward()
    assert shown == [f"{doing} of layer {index}" for doing, index in (("forward", 0), ("forward", 2))] + [
        f"backward of layer {index}" for index in (2, 0)
    ]
    shown.clear()
    with torch.no_grad():
        layers[0](torch.ones(1, 2))
    assert shown == ["forward of layer 0"]
