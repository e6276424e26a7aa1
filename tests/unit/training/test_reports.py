"""What a run shows: the time left, monitors without doubles, where it comes from."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import struct
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest

from harness import TrainingArguments, UserError
from harness.arguments.themes.reporting import monitor_sections, require_packages
from harness.console import Console, plain_console
from harness.extras.monitors import Monitors
from harness.extras.progress import ProgressCallback, clock, smoothed
from harness.installed import read_run_config
from harness.report.provenance import git_state
from harness.training.callbacks import StepRecord, TrainerControl, TrainerState
from tests.unit.training.full_disk import full_disk


def test_the_time_left_is_smoothed_and_in_hours() -> None:
    assert [clock(seconds) for seconds in (0.4, 61, 3600 * 30 + 5)] == ["0:00:00", "0:01:01", "30:00:05"]
    assert smoothed(None, 9.0) == 9.0
    assert 1.0 < smoothed(1.0, 9.0) < 5.0


def record_of(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        loss=1.0,
        grad_norm=None,
        learning_rate=0.1,
        tokens_per_second=1.0,
        step_seconds=1.0,
        consumed_samples=step,
        epoch=0.1,
    )


@pytest.mark.parametrize(("given", "lines"), [({"logging_steps": 2}, [1, 2, 4, 5]), ({}, [1, 5])])
def test_output_has_a_line_for_each_log_event_that_is_asked_for(
    given: dict[str, int], lines: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    args, state, control = TrainingArguments(**given), TrainerState(max_steps=5), TrainerControl()
    progress = ProgressCallback(plain_console(0))
    progress.on_train_begin(args, state, control)
    for step in range(1, 6):
        state.global_step = step
        progress.on_step_end(args, state, control, record=record_of(step))
    said = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in said] == lines


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_resumed_run_and_one_that_goes_back_log_each_step_once(tmp_path: Path) -> None:
    args = TrainingArguments(report_to="tensorboard,csv", output_dir=str(tmp_path), run_name="mine")
    sections = monitor_sections(args, args.output_dir, {})
    for first, last in ((1, 6), (4, 5)):
        monitors = Monitors(sections, "id", first)
        for step in range(first, last + 1):
            monitors.write({"train/loss": float(10 * first + step)}, step)
        monitors.rewind(last - 1)
        monitors.write({"train/loss": 0.5}, last)
        monitors.close()
    assert scalars(tmp_path / "tensorboard/mine") == {
        "train/loss": [(1, 11.0), (2, 12.0), (3, 13.0), (4, 44.0), (5, 0.5)]
    }
    table = (tmp_path / "csv/mine/train_loss.csv").read_text().split()
    assert table == ["step,loss", "1,11.0", "2,12.0", "3,13.0", "4,44.0", "5,0.5"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_monitors_that_cannot_be_written_end_nothing(tmp_path: Path) -> None:
    args = TrainingArguments(report_to="tensorboard,csv", output_dir=str(tmp_path))
    monitors = Monitors(monitor_sections(args, args.output_dir, {}), "id", 1)
    monitors.write({"train/loss": 1.0}, 1)
    (table,) = tmp_path.rglob("train_loss.csv")
    with full_disk(table.stat().st_size):
        for step in range(2, 5):
            with pytest.warns(UserWarning, match="CSV tables cannot be written: File too large; training continues"):
                monitors.write({"train/loss": 1.0}, step)
        with pytest.warns(UserWarning, match="TensorBoard's events"):
            monitors.rewind(1)
    monitors.write({"train/loss": 2.0}, 5)
    monitors.close()
    assert table.read_text().split()[1:] == ["1,1.0", "5,2.0"]


@pytest.mark.parametrize("config", [None, {"train_batch_size": 1, "wandb": {"enabled": True}}])
def test_a_monitor_whose_package_is_missing_is_refused_at_once(config: Any) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    args = TrainingArguments(deepspeed_config=config, report_to="none" if config else "wandb")
    with pytest.raises(UserError, match="wandb is not installed: pip install wandb"):
        read_run_config(args, world_size=1)
    require_packages(["csv_monitor"])


def test_the_git_state_says_whether_files_are_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "x").write_text("1")
    for words in (["init", "-q"], ["add", "x"], ["commit", "-qm", "first"]):
        subprocess.run([*command, *words], check=True, capture_output=True)
    state = git_state(tmp_path)
    assert state is not None and len(state["commit"]) == 40 and state["changed"] is False
    (tmp_path / "x").write_text("2")
    assert (git_state(tmp_path) or {})["changed"] is True


def test_a_checkout_runs_no_programs_of_its_own(tmp_path: Path) -> None:
    """A folder with a `.git` may be unpacked from an archive: monitor, hook and filter would run as the user."""
    command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "x").write_text("1")
    (tmp_path / ".gitattributes").write_text("* filter=own")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*command, *words], check=True, capture_output=True)
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    script.chmod(0o755)
    (tmp_path / ".git/hooks/post-index-change").symlink_to(script)
    (tmp_path / "x").write_text("2")
    settings = ("core.fsmonitor", "filter.own.clean", "filter.own.process")
    for name in settings:
        subprocess.run([*command, "config", name, str(script)], check=True)
        state = git_state(tmp_path)
        assert state is not None and state["changed"] is (True if name == settings[0] else None)
    assert not (tmp_path / "ran").exists()
    subprocess.run([*command, "status"], check=False, capture_output=True)
    assert (tmp_path / "ran").exists()  # by git alone it does run


@pytest.mark.parametrize(("columns", "is_terminal"), [(80, True), (0, False)])
def test_a_terminal_that_has_no_width_gets_lines(columns: int, is_terminal: bool) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        assert Console(out=terminal, error=terminal, speaks=True).is_terminal is is_terminal
    os.close(ours)


def test_a_narrow_bar_shows_the_time_left_and_the_loss_and_lines_above_it_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[str] = []
    logger = logging.getLogger("harness.extras.progress")
    monkeypatch.setattr(logger, "log", lambda _level, _form, text: collected.append(text))
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    args, state, control = TrainingArguments(), TrainerState(max_steps=2, global_step=1), TrainerControl()
    with os.fdopen(theirs, "w") as terminal:
        callback = ProgressCallback(Console(out=terminal, error=terminal, speaks=True))
        callback.on_train_begin(args, state, control)
        callback.on_step_end(args, state, control, record=record_of(1))
        callback.on_save(args, state, control, checkpoint=tmp_path)
        callback.on_train_end(args, state, control)
        terminal.flush()
        written = ""
        while written.count("\n") < 2:  # what a terminal is given arrives in pieces
            written += os.read(ours, 1 << 16).decode()
        shown = written.splitlines()[-1]
    os.close(ours)
    assert f"\rcheckpoint in {tmp_path}\r\n" in written and collected == [f"checkpoint in {tmp_path}"]
    assert "0:00:00 left, loss" in shown and len(shown.rpartition("\r")[2]) <= 60


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"flops_profiler": {"output_file": "../flops.txt"}}, {}),
        ({"flops_profiler": {"enabled": True, "output_file": "/etc/flops.txt"}}, {}),
        ({"csv_monitor": {"enabled": True, "job_name": "../../up"}}, {}),
        ({"csv_monitor": {"enabled": True, "output_path": "/elsewhere"}}, {}),
        ({"tensorboard": {"enabled": True, "output_path": "a/../../b"}}, {}),
        ({}, {"report_to": "csv", "run_name": "../../up"}),
    ],
)
def test_a_config_that_would_write_elsewhere_is_refused(
    config: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    args = TrainingArguments(str(tmp_path / "run"), deepspeed_config={"train_batch_size": 8, **config}, **arguments)
    with pytest.raises(
        UserError, match=rf"is outside of (the run's output_dir|--output_dir {tmp_path}/run: give a path in it)"
    ):
        read_run_config(args, world_size=1)


@pytest.mark.parametrize(
    ("section", "folder"),
    [
        ({}, "csv/run"),
        ({"job_name": "mine"}, "csv/mine"),
        ({"output_path": "tables", "job_name": ""}, "tables/run"),
        ({"output_path": "OUT/tables"}, "tables/run"),
    ],
)
def test_monitors_of_the_json_write_into_the_output_dir(section: dict[str, Any], folder: str, tmp_path: Path) -> None:
    stated = {name: value.replace("OUT", str(tmp_path)) for name, value in section.items()}
    config = {"csv_monitor": {"enabled": True, **stated}}
    monitors = Monitors(monitor_sections(TrainingArguments(str(tmp_path)), str(tmp_path), config), "id", 1)
    monitors.write({"train/loss": 1.0}, 1)
    monitors.close()
    assert (tmp_path / folder / "train_loss.csv").read_text().split() == ["step,loss", "1,1.0"]
