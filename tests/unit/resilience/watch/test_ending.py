"""What is left when the watch ends a run: a line, the stacks, and a record of the rank that is named."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from harness.console import Console
from harness.resilience.process.records import THIS_RANK
from harness.resilience.watch.diagnosis import Diagnosis, RankStatus
from harness.resilience.watch.ending import announce, append_stacks
from harness.topology.env import RECORDS
from tests.unit.resilience.watch.statuses import rank_status


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "records").mkdir()
    monkeypatch.setenv(RECORDS, str(folder))
    return folder


def said(verdict: Diagnosis, statuses: list[RankStatus], path: Path) -> str:
    console = Console(out=io.StringIO(), error=io.StringIO(), speaks=False)
    announce(verdict, statuses, path, console)
    assert isinstance(console.error, io.StringIO)
    return console.error.getvalue()


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


def test_a_hang_leaves_a_line_the_ranks_and_a_record_of_the_one_to_blame(tmp_path: Path, records: Path) -> None:
    verdict = Diagnosis(error="Hang", culprit=1, step=7, message="rank 1 hangs in step 7")
    statuses = [rank_status(0), rank_status(1, state="T", doing="Forward(3)"), rank_status(2)]
    path = tmp_path / "hang-7.txt"
    line = said(verdict, statuses, path)
    assert line == f"error: rank 1 hangs in step 7; the Python stacks of all ranks are in {path}\n"
    text = path.read_text().splitlines()
    assert path.name == "hang-7.txt" and text[:2] == ["rank 1 hangs in step 7", ""]
    assert text[2:] == [*map(str, statuses), "rank 1 (stage 1, host a) is stopped, so it cannot write its stack"]
    (record,) = recorded(records).values()
    about = {name: record[name] for name in ("rank", "pid", "stage", "step", "doing", "error", "is_user_error")}
    assert about == dict(rank=1, pid=101, stage=1, step=7, doing="Forward(3)", error="Hang", is_user_error=False)
    assert record["message"] == line.removeprefix("error: ").rstrip()


def test_where_all_wait_for_each_other_this_rank_stands_for_them(tmp_path: Path, records: Path) -> None:
    said(
        Diagnosis(error="Silent", culprit=-1, step=2, message="m"),
        [rank_status(THIS_RANK.rank), rank_status(THIS_RANK.rank + 1)],
        tmp_path,
    )
    assert [record["rank"] for record in recorded(records).values()] == [THIS_RANK.rank]


def test_of_a_rank_that_is_dead_there_is_a_line_alone(tmp_path: Path, records: Path) -> None:
    verdict = Diagnosis(error="Dead", culprit=1, step=2, message="rank 1 was killed\nby SIGKILL")
    assert (
        said(verdict, [rank_status(0), rank_status(1, state="")], tmp_path / "hang")
        == "error: rank 1 was killed by SIGKILL\n"
    )
    assert recorded(records) == {} and not (tmp_path / "hang").exists()


def test_each_rank_adds_its_stacks_behind_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "hang-3.txt"
    path.write_text("of another rank\n")
    append_stacks(path)
    text = path.read_text()
    assert text.startswith(
        f"of another rank\n\n== rank {THIS_RANK.rank}, host {THIS_RANK.host}, step {THIS_RANK.step}, "
    )
    assert "test_each_rank_adds_its_stacks_behind_what_is_there" in text


def test_a_folder_that_is_gone_does_not_end_a_run_otherwise(tmp_path: Path) -> None:
    append_stacks(tmp_path / "gone" / "hang-1.txt")
    verdict = Diagnosis(error="Hang", culprit=0, step=1, message="m")
    assert said(verdict, [rank_status(0)], tmp_path / "gone" / "hang-1.txt").startswith("error: m; ")
    assert not (tmp_path / "gone").exists()
