"""What a run leaves behind, and what it tells: files that survive a kill, whole checkpoints, a quiet console."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from harness import UserError
from harness.checkpoint.directories import (
    TrainingProgress,
    contents,
    finish,
    numbered,
    partial_name,
    prune,
    remove,
    set_aside_newer,
)
from harness.checkpoint.integrity import find_resume, newest
from harness.checkpoint.saved_run import SavedRun
from harness.console import plain_console
from harness.hf.skeleton import read_source
from harness.quiet import quiet
from harness.training.prepare.preparation import report_origin
from harness.training.recording.recorder import MetricsFile
from tests.unit.training.full_disk import full_disk


def progress(step: int, layout: str = "pp1 x dp1 x tp1") -> TrainingProgress:
    return TrainingProgress(
        step=step, consumed_samples=step, layout=layout, zero_stage=0, precision="fp32", seed=42, data="d"
    )


def save(folder: Path, step: int) -> Path:
    (folder / partial_name(step)).mkdir()
    (folder / partial_name(step) / "model.safetensors").write_text(str(step))
    return finish(folder, progress(step), contents(folder / partial_name(step)))


def test_a_resumed_file_drops_later_steps_and_a_line_cut_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    file = MetricsFile(path, first_step=3)
    file.write({"step": 3, "loss": float("nan")})
    file.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"step": 1}, {"step": 2}, {"step": 3, "loss": None}]


def test_metrics_are_not_written_where_a_link_leads(tmp_path: Path) -> None:
    (target := tmp_path / "theirs").write_text("precious")
    (tmp_path / "metrics.jsonl").symlink_to(target)
    with pytest.raises(UserError, match=r"metrics\.jsonl: it is not a file"):
        MetricsFile(tmp_path / "metrics.jsonl", first_step=1)
    assert target.read_text() == "precious"


@pytest.mark.filterwarnings("ignore:.*cannot be written")
def test_metrics_wait_for_room_and_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, first_step=1)
    file.write({"step": 1})
    with full_disk(path.stat().st_size + 5):
        for step in range(2, 500):
            file.write({"step": step})
        with pytest.warns(UserWarning, match=r"metrics\.jsonl: cannot be written: File too large; training continues"):
            file.write({"step": 500})
        file.rewind(450)
    for step in range(451, 600):
        file.write({"step": step})
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 600))


def test_metrics_go_on_in_a_new_file_where_the_folder_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = MetricsFile(path, first_step=1)
    file.write({"step": 1})
    shutil.rmtree(path.parent)
    with pytest.warns(UserWarning, match=f"{path}: it was deleted; metrics continue in a new file"):
        file.write({"step": 2})
    with warnings.catch_warnings(action="error"):
        file.write({"step": 3})
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 3]


def test_only_finished_checkpoints_count_and_the_newest_is_taken(tmp_path: Path) -> None:
    assert find_resume(tmp_path, "auto") is None
    for step in (2, 10, 9):
        save(tmp_path, step)
    (tmp_path / partial_name(11)).mkdir()
    (tmp_path / "checkpoint-12").mkdir()
    assert find_resume(tmp_path, "auto") == tmp_path / "checkpoint-10"
    remove(prune(tmp_path, newest(tmp_path, 2, 10)))  # two whole ones, and what is newer
    assert [step for step, _ in numbered(tmp_path)] == [9, 10, 12]
    assert not (tmp_path / partial_name(11)).exists()
    remove(prune(tmp_path, newest(tmp_path, None, 10)))
    assert len(numbered(tmp_path)) == 3


def test_going_back_to_an_older_one_sets_the_newer_ones_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    assert set_aside_newer(tmp_path, tmp_path / "checkpoint-6") == []
    moved = set_aside_newer(tmp_path, tmp_path / "checkpoint-2")
    assert [path.name for path in moved] == ["abandoned-checkpoint-4", "abandoned-checkpoint-6"]
    assert find_resume(tmp_path, "auto") == tmp_path / "checkpoint-2"
    for number in (1, 2):  # and once more back from there: the first ones stay
        save(tmp_path, 4)
        (again,) = set_aside_newer(tmp_path, tmp_path / "checkpoint-2")
        assert again.name == f"abandoned-checkpoint-4.{number}"
    assert all(path.is_dir() for path in moved)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (tmp_path / partial_name(4)).mkdir()
    (tmp_path / partial_name(4) / "weights").write_text("again")
    assert (finish(tmp_path, progress(4), {}) / "weights").read_text() == "again"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_a_fresh_start_into_a_used_folder_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 4)
    with pytest.raises(UserError, match="already holds a run"):
        find_resume(tmp_path, None)
    with pytest.raises(UserError, match="no whole checkpoint"):
        find_resume(tmp_path, str(tmp_path / "checkpoint-5"))


def test_another_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    (tmp_path / partial_name(1)).mkdir()
    config = {"rope_theta": 10000.0, "num_attention_heads": 4, "layer_types": ["full", "full"]}
    saved = finish(tmp_path, replace(progress(1), model="3 layers", model_config=config), {})
    SavedRun.read(saved).require_same_model("3 layers", {**config, "of_a_later_version": 1})
    with pytest.raises(UserError, match=r"contains a model of 3 layers, but this run's model has 4 layers"):
        SavedRun.read(saved).require_same_model("4 layers", config)
    with pytest.raises(UserError, match=r"a model whose num_attention_heads is 4, but this run's has 8: resume with"):
        SavedRun.read(saved).require_same_model("3 layers", {**config, "num_attention_heads": 8, "rope_theta": 5.0})


def test_chatter_goes_to_the_log_and_rank_0_still_speaks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "rank_0.log"
    with quiet(log, 0) as console:
        print("chatter")
        os.write(2, b"chatter from below\n")
        console.say("hello")
        for line in (1, 2):  # said twice, told once
            warnings.warn_explicit("ours", UserWarning, str(Path(sys.modules["harness"].__file__)), line)
        warnings.warn_explicit("theirs", UserWarning, "/elsewhere/x.py", 1)
        console.fail("two\nlines")
    out, error = capfd.readouterr()
    assert out == "hello\nwarning: ours\n"
    assert error == "error: two lines\n"
    text = log.read_text()
    assert text == "chatter\nchatter from below\n"  # pytest keeps the other warning
    print("after")
    assert capfd.readouterr().out == "after\n"


def test_a_directory_without_weights_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read_source("tiny-llama").config.save_pretrained(tmp_path)
    report_origin(plain_console(0), read_source("tiny-llama"), 7)  # a preset has none, and nobody expects any
    report_origin(plain_console(0), read_source(str(tmp_path)), 7)
    assert capsys.readouterr().out.splitlines() == [
        f"no weights found (safetensors or pytorch_model.bin) in {tmp_path}: initialising from seed 7"
    ]


def test_other_ranks_are_silent_but_for_errors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with quiet(tmp_path / "rank_1.log", 1) as console:
        console.say("hello")
        console.fail("rank 1: lost")
    assert capfd.readouterr() == ("", "error: rank 1: lost\n")
