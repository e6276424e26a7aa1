"""A signal while a Trainer trains: one checkpoint, the usual exit code, and the numbers of a whole run after it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Trainer, TrainerCallback, TrainingArguments, UserError
from harness.checkpoint.directories import read_manifest
from harness.checkpoint.integrity import damage
from harness.resilience.process import signals
from harness.resilience.process.signals import Stopped


def send(number: int) -> None:
    """Send this process a signal, and wait for it to be noticed."""
    os.kill(os.getpid(), number)
    while not signals.received():
        pass


class Signal(TrainerCallback):
    """Sends this process a signal in a step."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step
        self.ended = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            send(self.number)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended += 1


class Evaluate(TrainerCallback):
    """Evaluates in a callback of its own."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["trainer"].evaluate()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run that no signal reaches."""
    return train(tmp_path_factory.mktemp("whole"))


class Saved(TrainerCallback):
    """Notes which checkpoints are whole, and what is there when that is said."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert damage(kwargs["checkpoint"]) is None
        self.names.append(kwargs["checkpoint"].name)


def train(
    folder: Path,
    *callbacks: TrainerCallback,
    evaluation: Any = None,
    loss_fn: Any = torch.nn.functional.mse_loss,
    kind: type[Trainer] = Trainer,
    **changes: Any,
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    points = torch.randn(64, 2).tolist()
    arguments = TrainingArguments(
        deepspeed_config={"train_batch_size": 8, "zero_optimization": {"stage": 1}},
        output_dir=str(folder),
        **{"max_steps": 5, "learning_rate": 1e-2, "save_steps": 0, **changes},
    )
    layers = [torch.nn.Linear(2, 8), torch.tanh, torch.nn.Linear(8, 1)]
    data = [(torch.tensor(point), torch.tensor(point[:1])) for point in points]
    trainer = kind(layers, arguments, data, evaluation, loss_fn=loss_fn, callbacks=callbacks)
    try:
        trainer.train()
    finally:
        trainer.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_a_run_saves_once_and_goes_on_with_the_same_numbers(
    number: int, code: int, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    callback = Signal(number, step=2)
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as stopped:
        train(tmp_path / "cut", callback)
    assert stopped.value.code == code
    assert callback.ended == 1
    assert signal.getsignal(number) is before
    assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-2"]
    rest = train(tmp_path / "cut", resume_from_checkpoint="auto")
    assert [(row["step"], row["loss"]) for row in rest] == [(row["step"], row["loss"]) for row in whole]


@pytest.mark.parametrize(("callbacks", "changes"), [((), {"eval_steps": 2}), ((Evaluate(),), {})])
def test_a_signal_does_not_wait_for_a_long_evaluation(callbacks: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    class Points(list[Any]):
        read = 0

        def __getitem__(self, index: Any) -> Any:
            self.read += 1
            if self.read == 400:
                send(signal.SIGUSR1)
            return super().__getitem__(index)

    points = Points((torch.ones(2) * index, torch.ones(1)) for index in range(1024))
    with pytest.raises(Stopped) as stopped:
        train(tmp_path, *callbacks, evaluation=points, **changes)
    assert stopped.value.code == 138
    assert points.read < 400 + 200  # not the 1024 of a whole evaluation
    saved = [path.name for path in tmp_path.glob("checkpoint-*")]
    assert len(saved) == 1
    assert (tmp_path / "evaluations.jsonl").read_text() == ""
    rest = train(tmp_path, resume_from_checkpoint="auto")
    assert [row["step"] for row in rest] == [1, 2, 3, 4, 5]


def test_a_loss_that_draws_random_numbers_goes_on_to_the_bit(tmp_path: Path) -> None:
    class Counters(TrainerCallback):
        seen: list[tuple[int, ...]] = []  # noqa: RUF012  # of one run after the other

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            engine = kwargs["trainer"].engine.deepspeed
            self.seen.append((engine.global_steps, engine.global_samples, engine.skipped_steps))

        on_train_end = on_train_begin

    def noisy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (outputs + torch.randn_like(outputs) - labels).square().mean()

    counters = Counters()
    whole = train(tmp_path / "whole", counters, loss_fn=noisy, save_steps=3)
    assert len({row["loss"] for row in whole}) == 5
    torch.manual_seed(99)  # what the process has drawn before does not matter
    saved = str(tmp_path / "whole" / "checkpoint-3")
    rest = train(tmp_path / "rest", counters, loss_fn=noisy, resume_from_checkpoint=saved)
    assert counters.seen == [(0, 0, 0), (5, 40, 0), (3, 24, 0), (5, 40, 0)]
    assert [(row["step"], row["loss"]) for row in rest] == [(row["step"], row["loss"]) for row in whole[3:]]


def test_going_back_to_an_older_checkpoint_leaves_the_newer_ones_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate: Any = {"lr_scheduler_type": "constant"}
    whole = [row["loss"] for row in train(tmp_path, save_steps=1, **rate)]
    back = str(tmp_path / "checkpoint-3")
    again = train(tmp_path, resume_from_checkpoint=back, max_steps=4, save_steps=4, **rate)
    assert [row["loss"] for row in again] == whole[:4]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == [
        *("abandoned-checkpoint-4", "abandoned-checkpoint-5"),
        *(f"checkpoint-{step}" for step in (1, 2, 3, 4)),
    ]
    assert f"a newer checkpoint is now {tmp_path}/abandoned-checkpoint-5" in capsys.readouterr().out
    train(tmp_path / "other", save_steps=5, **rate)
    shutil.copytree(tmp_path / "other" / "checkpoint-5", tmp_path / "checkpoint-5")
    rest = train(tmp_path, resume_from_checkpoint="auto", **rate)
    assert [row["loss"] for row in rest] == whole
    said = capsys.readouterr().out
    assert f"{tmp_path}/checkpoint-5 was saved by another run: it is now {tmp_path}/foreign-checkpoint-5" in said
    assert f"resumed from {tmp_path}/checkpoint-4 at step 4" in said
    run_id = json.loads((tmp_path / "run.json").read_text())["run_id"]  # kept whenever the run was resumed
    assert {read_manifest(path).run_id for path in tmp_path.glob("*checkpoint-[1-4]")} == {run_id}


def test_a_run_saves_by_the_clock_and_keeps_to_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wandering(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.chdir(tmp_path / "elsewhere")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    saved = Saved()
    given: Any = {"save_seconds": 1e-6, "save_total_limit": 2, "max_steps": 9}
    with pytest.raises(FileNotFoundError):  # `train` reads the metrics by the relative path
        train(Path("run"), saved, Wandering(), **given)
    assert list(Path("../elsewhere").iterdir()) == []
    names = sorted((path.name for path in (tmp_path / "run").glob("checkpoint-*")), key=lambda name: int(name[11:]))
    assert names == saved.names[-2:] and names[-1] == "checkpoint-9"
    assert saved.names[0] == "checkpoint-1"
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["run_id"]
    assert {read_manifest(tmp_path / "run" / name).run_id for name in names} == {run_id}


def test_a_run_that_ends_by_an_error_finishes_its_checkpoint(tmp_path: Path) -> None:
    calls = []

    def breaking(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(outputs)
        return (outputs - labels).square().mean() * (1.0 if len(calls) < 4 else float("nan"))

    saved = Saved()
    with pytest.raises(UserError, match="step 4: the loss is nan"):  # at once after the checkpoint has begun
        train(tmp_path, saved, loss_fn=breaking, save_steps=3)
    assert saved.names == ["checkpoint-3"]


def test_a_checkpoint_is_whole_before_the_next_step_but_one(tmp_path: Path) -> None:
    class Look(TrainerCallback):
        seen: bool | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                self.seen = damage(tmp_path / "checkpoint-2") is None

    look = Look()
    train(tmp_path, look, save_steps=2)
    assert look.seen


def test_a_subclass_saves_in_its_own_way(tmp_path: Path) -> None:
    class OwnSave(Trainer):
        def save_checkpoint(self) -> Path:
            path = super().save_checkpoint()
            (path / "mine").touch()
            return path

    train(tmp_path, kind=OwnSave, save_steps=2)
    assert sorted(path.parent.name for path in tmp_path.glob("*/mine")) == [f"checkpoint-{n}" for n in (2, 4, 5)]


def test_a_run_that_could_not_save_does_not_say_that_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Spoil(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:  # weights that no checkpoint may hold
                next(kwargs["model"].parameters()).data.fill_(float("nan"))

    with pytest.raises(Stopped):
        train(tmp_path, Spoil(), Signal(signal.SIGTERM, step=3), save_steps=2, nonfinite="skip")
    said = capsys.readouterr().out
    assert "warning: no checkpoint of step 3: " in said and "checkpoint-3 is not written" in said
    assert 'stopped after step 3, which could not be saved; resume_from_checkpoint "auto" resumes at step 2' in said
    assert "saved and stopped" not in said
