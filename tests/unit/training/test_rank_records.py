"""What a rank leaves for its supervisor: its position, the reason of its end, success."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import train
from harness.errors import UserError
from harness.resilience.process import records


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DS_HARNESS_RECORDS", str(tmp_path))
    monkeypatch.setattr(records, "THIS_RANK", records.Position(rank=1, host="here", stage=0))
    return tmp_path


def test_a_failure_says_where_and_why_and_the_first_one_stays(folder: Path) -> None:
    records.THIS_RANK.step = 7
    records.record_step()
    records.THIS_RANK.doing = "saving"
    records.record_failure(ValueError("first line\nsecond"))
    records.record_failure(UserError("later"))
    (failure,) = records.read_failures(folder)
    assert (failure.rank, failure.host, failure.stage, failure.step, failure.doing) == (1, "here", 0, 7, "saving")
    assert (failure.error, failure.message, failure.is_user_error) == ("ValueError", "first line", False)
    assert records.read_positions(folder)[1].step == 7


def test_failures_come_in_the_order_of_time_and_lost_peers_are_known(folder: Path) -> None:
    for rank, error in ((3, RuntimeError("Connection closed by peer [::1]")), (0, UserError("a\n")), (2, OSError())):
        records.THIS_RANK.rank = rank
        records.record_failure(error)
    found = records.read_failures(folder)
    assert [failure.rank for failure in found] == [3, 0, 2]
    assert [failure.is_lost_peer for failure in found] == [True, False, False]
    assert [failure.is_user_error for failure in found] == [False, True, False]
    (folder / "rank-9.json").write_text("{")  # a host that died while it wrote
    assert len(records.read_failures(folder)) == 3


def test_success_is_of_rank_0_alone(folder: Path) -> None:
    records.record_success()
    assert not (folder / records.SUCCESS).exists()
    records.THIS_RANK.rank = 0
    records.record_success()
    assert (folder / records.SUCCESS).exists()


def test_nothing_is_written_without_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_HARNESS_RECORDS", raising=False)
    monkeypatch.chdir(tmp_path)
    records.THIS_RANK.step = 1
    records.record_step()
    records.record_failure(ValueError())
    assert list(tmp_path.iterdir()) == []


def test_the_script_records_what_the_user_must_fix(folder: Path, tmp_path: Path) -> None:
    assert train.main(["--model_name_or_path", "no-such-model", "--output_dir", str(tmp_path / "run")]) == 1
    (failure,) = records.read_failures(folder)
    assert failure.is_user_error and "no-such-model" in failure.message and failure.step == 0


def test_records_need_no_torch() -> None:
    code = "import harness.resilience.process.records, sys, json; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
