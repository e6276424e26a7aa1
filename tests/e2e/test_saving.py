"""The checkpoints of a run in one process, the model that it leaves, and how a Trainer goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainerCallback, TrainingArguments, UserError
from harness.checkpoint.background_save import NotSaved
from harness.checkpoint.directories import read_progress
from harness.training.saving.writing import progress_of, stream_position
from tests.unit.training.full_disk import full_disk

POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(16)]
TOKENS = [{"input_ids": [(5 * i + k) % 250 for k in range(8)]} for i in range(8)]

Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Trainers of a few layers, or of another model, that are closed at the end."""
    made: list[Trainer] = []

    def trainer(folder: str = "run", model: Any = None, data: Any = POINTS, **more: Any) -> Trainer:
        kinds = {name: more.pop(name) for name in ("callbacks", "peft_config") if name in more}
        config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
        settings = {"max_steps": 4, "learning_rate": 0.05, "save_steps": 0, "lr_scheduler_type": "constant", **more}
        arguments = TrainingArguments(str(tmp_path / folder), deepspeed_config=config, **settings)
        torch.manual_seed(0)
        layers = model or [nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)]
        loss = nn.functional.mse_loss if model is None else None
        made.append(Trainer(layers, arguments, data, loss_fn=loss, **kinds))
        return made[-1]

    yield trainer
    for each in made:
        each.close()


class Saved(TrainerCallback):
    """Notes which checkpoints became whole."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_save(self, *_: Any, **given: Any) -> None:
        self.names.append(given["checkpoint"].name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def step(trainer: Trainer) -> None:
    trainer.training_step()


def test_a_state_is_saved_once_however_often_that_is_due(make: Make, tmp_path: Path) -> None:
    saved = Saved()
    ours = make(callbacks=[saved])
    assert ours.checkpoints.newest is None and not ours.checkpoints.is_ready
    for _ in range(2):
        step(ours)
        for _ in range(3):
            ours.checkpoints.begin()
        ours.checkpoints.finish()
        ours.checkpoints.begin(last=True)
    assert saved.names == ["checkpoint-1", "checkpoint-2"] == names(tmp_path / "run")
    assert ours.checkpoints.newest == 2
    assert ours.save_checkpoint() == tmp_path / "run" / "checkpoint-2"  # asked for, so it is written anew
    assert read_progress(tmp_path / "run" / "checkpoint-2").consumed_samples == 8


def test_a_save_that_falls_due_waits_for_the_one_before(make: Make, tmp_path: Path) -> None:
    ours = make()
    step(ours)
    ours.checkpoints.begin()
    step(ours)
    ours.checkpoints.wait_a_moment()
    ours.checkpoints.begin()
    assert names(tmp_path / "run")[0] == "checkpoint-1"
    ours.close()
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]


def test_a_checkpoint_is_due_by_the_clock_once_and_not_while_one_is_written(make: Make) -> None:
    ours = make(save_seconds=1e6)
    checkpoints = ours.checkpoints
    assert not checkpoints.is_due
    checkpoints._begun -= 1e6
    assert checkpoints.is_due
    step(ours)
    checkpoints.begin()
    checkpoints._begun -= 1e6
    assert not checkpoints.is_due
    checkpoints.finish()
    assert checkpoints.is_due
    assert not make("other").checkpoints.is_due


def test_weights_that_are_not_finite_are_tried_again_when_they_are(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = make(nonfinite="skip")
    step(ours)
    weight = next(ours.run.module.parameters())
    good = weight.data.clone()
    weight.data.fill_(float("nan"))
    ours.checkpoints.begin()
    with pytest.raises(NotSaved, match=r"is not finite .*: checkpoint-1 is not written"):
        ours.save_checkpoint()
    assert "warning: no checkpoint of step 1: " in capsys.readouterr().out
    assert names(tmp_path / "run") == [] and ours.checkpoints.newest is None
    weight.data.copy_(good)
    ours.checkpoints.begin()
    ours.checkpoints.finish()
    assert names(tmp_path / "run") == ["checkpoint-1"]


def test_a_checkpoint_that_did_not_fit_on_the_disk_is_tried_again(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = make()
    step(ours)
    with full_disk(100):
        with pytest.raises(NotSaved):
            ours.save_checkpoint()
        ours.checkpoints.begin()
        ours.checkpoints.finish()
    told = capsys.readouterr().out
    assert "warning: no checkpoint of step 1" in told and "training continues" in told
    assert names(tmp_path / "run") == []
    with pytest.raises(NotSaved), full_disk(100):
        ours.save_checkpoint()
    ours.checkpoints.begin(last=True)  # due for the same step
    assert names(tmp_path / "run") == ["checkpoint-1"]


@pytest.mark.parametrize(("error", "kept"), [(UserError("wrong"), True), (ValueError("wrong"), False)])
def test_only_an_error_that_all_ranks_have_waits_for_the_checkpoint(error: Exception, kept: bool, make: Make) -> None:
    saved = Saved()
    ours = make(callbacks=[saved])
    step(ours)
    with pytest.raises(type(error)), ours.checkpoints:
        ours.checkpoints.begin()
        raise error
    assert saved.names == ["checkpoint-1"] * kept


def test_a_folder_that_holds_another_run_is_left_alone_or_its_checkpoints_get_other_names(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make()
    first.train()
    first.save_checkpoint()
    first.close()
    second = make()
    with pytest.raises(UserError, match="already holds a run: give another directory"):
        second.train()
    assert names(tmp_path / "run") == ["checkpoint-4"]
    second.close()
    capsys.readouterr()
    third = make(overwrite_output_dir=True, max_steps=2)
    third.train()
    assert "checkpoint-4 is of an earlier run: it is now" in capsys.readouterr().out
    assert third.save_checkpoint().name == "checkpoint-2"
    assert "checkpoint-4" not in names(tmp_path / "run") and (tmp_path / "run" / "metrics.1.jsonl").exists()


def test_a_run_that_goes_on_is_the_one_that_was_not_interrupted(make: Make, tmp_path: Path) -> None:
    whole = make("whole")
    whole.train()
    wanted = [value.clone() for value in whole.run.module.state_dict().values()]
    whole.close()
    first = make("half", max_steps=4)
    for _ in range(2):
        step(first)
    saved = first.save_checkpoint()
    first.close()
    for name, given in (("half", True), ("elsewhere", saved)):
        again = make(name)
        again.train(given)
        assert [*map(torch.equal, again.run.module.state_dict().values(), wanted)] == [True] * len(wanted)
        assert again.state.global_step == 4
        assert again.run.run_id == read_progress(saved).run_id
        # the newest of a run elsewhere is not its own
        assert again.checkpoints.newest == (2 if name == "half" else None)
        again.close()


def test_what_differs_from_the_checkpoint_is_said_or_refused(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make()
    step(first)
    saved = first.save_checkpoint()
    first.close()
    capsys.readouterr()
    other = make("other", learning_rate=0.1, seed=7, max_steps=1)
    other.train(saved)
    said = capsys.readouterr().out
    assert f"resumed from {saved} at step 1" in said and "nothing left to train: 1 step done" in said
    assert "learning_rate: 0.05 in the checkpoint, 0.1 in this run" in said
    assert "was saved with another seed or other training data" in said
    other.close()
    with pytest.raises(UserError, match=r"train\(resume_from_checkpoint=True\): no whole checkpoint in .*empty"):
        make("empty").train(True)
    with pytest.raises(UserError, match="no whole checkpoint there"):
        make("gone").train(tmp_path / "nothing")
    assert make("fresh").train("auto").global_step == 4  # begins afresh


def test_a_trainer_that_is_closed_twice_leaves_the_one_in_its_place_alone(make: Make) -> None:
    first = make("first")
    first.close()
    second = make("second")
    first.close()
    assert second.train().global_step == 4


def test_a_checkpoint_says_where_the_run_stands(make: Make) -> None:
    ours = make()
    step(ours)
    progress = progress_of(ours.run, ours.state)
    assert (progress.step, progress.consumed_samples, progress.seed) == (1, 4, 42)
    assert (progress.zero_stage, progress.precision, progress.layout) == (0, "fp32", "pp1 x dp1 x tp1")
    assert progress.model == "3 layers (Linear, Tanh) and 17 parameters" and progress.model_config == {}
    assert progress.optimizer == "AdamW" and progress.data == ours.run.digest
    assert progress.stream == stream_position(ours.run, 4) == {}
    assert progress.skipped_samples is not ours.state.skipped_samples  # the state goes on


def test_the_whole_model_is_what_from_pretrained_reads(make: Make, tmp_path: Path) -> None:
    ours = make(model="tiny-llama", data=TOKENS, max_steps=2)
    ours.train()
    model = ours.trained_model()
    folder = ours.save_model(tmp_path / "model")
    assert model is not None and not model.training
    read = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(value, read[name]) for name, value in model.state_dict().items())
    assert (folder / "config.json").exists()
    assert ours.model is ours.run.module and ours.model.config.model_type == "llama"
    with torch.no_grad():  # it is a copy
        next(model.parameters()).zero_()
    assert not torch.equal(next(ours.trained_model().parameters()), next(model.parameters()))  # type: ignore[union-attr]


def test_of_layers_the_tensors_are_written_and_no_model_is_made(make: Make, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ours = make()
    step(ours)
    folder = ours.save_model(tmp_path / "model")
    found = load_file(folder / "model.safetensors")
    held = dict(ours.run.module.named_parameters())
    assert sorted(value.shape for value in found.values()) == sorted(value.shape for value in held.values())
    assert not (folder / "config.json").exists()
    with pytest.raises(UserError, match=r"trained_model\(\) supports HuggingFace models only: save_model\(\)"):
        ours.trained_model()
    assert not hasattr(ours.model, "config")


def test_adapters_are_not_gathered(make: Make) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    ours = make(model="tiny-llama", data=TOKENS, peft_config=adapters)
    with pytest.raises(UserError, match="does not support adapters: call save_model"):
        ours.trained_model()
