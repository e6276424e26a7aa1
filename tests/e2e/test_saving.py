"""The checkpoints of a run in one process, the model that it leaves, and how a Trainer goes on from one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainerCallback, TrainingArguments, UserError
from harness.checkpoint.directories import read_progress
from harness.checkpoint.tensors.not_saved import NotSaved
from harness.cli import main
from harness.data.tokenizer import ByteTokenizer
from harness.training.saving.checkpoints import progress_of, stream_position
from tests.support.training import tiny_model
from tests.unit.training.full_disk import full_disk

POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(16)]
TOKENS = [{"input_ids": [(5 * i + k) % 250 for k in range(8)]} for i in range(8)]

Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Trainers of a few layers, or of another model, that are closed at the end."""
    made: list[Trainer] = []

    def trainer(folder: str = "run", model: Any = None, data: Any = POINTS, **more: Any) -> Trainer:
        names = ("callbacks", "peft_config", "processing_class", "eval_dataset", "compute_metrics")
        kinds = {name: more.pop(name) for name in names if name in more}
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


class OfAnotherLibrary(ByteTokenizer):
    """Fails half-way as the tokenizers library does on a full disk, with a plain Exception."""

    is_full = False

    def save_pretrained(self, directory: Any) -> None:
        super().save_pretrained(directory)
        if self.is_full:
            (Path(directory) / "tokenizer.json").write_text("{")
            raise Exception("No space left on device (os error 28)")


def test_a_tokenizer_that_does_not_fit_on_the_disk_ends_no_run_and_the_earlier_one_stays(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = OfAnotherLibrary()
    ours = make(model="tiny-llama", data=TOKENS, processing_class=tokenizer, save_steps=1, max_steps=2)
    before = (ours.save_model() / "tokenizer.json").read_text()
    tokenizer.is_full = True
    assert ours.train().global_step == 2
    assert capsys.readouterr().out.count("No space left on device (os error 28) (it needs ") == 2
    with pytest.raises(NotSaved, match=r"^the model cannot be written to .*run: rank 0: No space left on device"):
        ours.save_model()
    assert names(tmp_path / "run") == [] and (tmp_path / "run" / "tokenizer.json").read_text() == before


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
    assert "checkpoint-4 belongs to an earlier run: it is now" in capsys.readouterr().out
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
    longer = make("longer")
    step(longer)
    step(longer)
    saved = longer.save_checkpoint()
    longer.close()
    capsys.readouterr()
    make("shorter", max_steps=1).train(saved)
    said = " ".join(capsys.readouterr().out.split())
    assert "nothing left to train: 2 steps done, max_steps is 1" in said and "train(): all 2 steps are done" in said
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
    progress = progress_of(ours.run)
    assert (progress.step, progress.consumed_samples, progress.seed) == (1, 4, 42)
    assert (progress.zero_stage, progress.precision, progress.layout) == (0, "fp32", "pp1 x dp1 x tp1")
    assert progress.model == "3 layers (Linear, Tanh) and 17 parameters" and progress.model_config == {}
    assert progress.optimizer == "AdamW" and progress.data == ours.run.spec.data_digest
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


@pytest.mark.parametrize("exports", ["save_model", "checkpoint export"])
def test_what_from_pretrained_reads_is_the_last_export_into_a_folder(make: Make, tmp_path: Path, exports: str) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    base, out = (tiny_model(tmp_path / name, "llama", False, vocab_size=301) for name in ("base", "out"))
    (tmp_path / "out" / "adapter_model.safetensors").write_text("no adapters, without their config")
    (tmp_path / "out" / "chat_template.jinja").write_text("of another tokenizer")

    def written(number: int, base: str, **more: Any) -> Any:
        ours = make(f"run-{number}", model=base, data=TOKENS, processing_class=ByteTokenizer(), **more)
        step(ours)
        clean = ours.save_model(tmp_path / f"clean-{number}")
        if exports == "save_model":
            ours.save_model(out)
        else:
            assert main(["checkpoint", "export", str(ours.save_checkpoint()), "--output_dir", out]) == 0
        ours.close()
        ids = torch.arange(20)[None]
        wanted, found = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (clean, out))
        assert torch.equal(wanted, found)
        return found

    of_adapters = written(1, base, peft_config=adapters)
    assert not torch.equal(of_adapters, written(2, base))
    assert sorted(path.name for path in (tmp_path / "out" / "adapters.1").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (tmp_path / "out" / "model.1" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    written(3, out, peft_config=adapters)  # their own base model stays
    assert (tmp_path / "out" / "config.json").is_file()


# -- the best model ------------------------------------------------------------------------------------------


class Kept(TrainerCallback):
    """Notes the first weights after each step, and does something to the disk before some steps."""

    def __init__(self, before: dict[int, Callable[[], object]] | None = None) -> None:
        self.before, self.weights = before or {}, {0: 0.0}

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.before.get(state.global_step + 1, lambda: None)()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.weights[state.global_step] = weight(given["trainer"])


def weight(trainer: Trainer) -> float:
    first = next(trainer.run.module.parameters())
    return float(first.detach().sum())


def best_run(
    make: Make, scores: dict[int, float], before: dict[int, Callable[[], object]] | None = None, **more: Any
) -> tuple[Trainer, Kept]:
    """A run of 8 steps whose evaluations have these scores, by step."""
    trainers: list[Trainer] = []
    kept = Kept(before)

    def score(_: Any) -> dict[str, float]:
        return {"score": scores.get(trainers[0].state.global_step, 0.0)}

    wanted = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 4, "save_total_limit": 1}
    asked = {"load_best_model_at_end": True, "metric_for_best_model": "score", **wanted, **more}
    trainers.append(make(callbacks=[kept], eval_dataset=POINTS[:4], compute_metrics=score, **asked))
    return trainers[0], kept


@pytest.mark.parametrize(
    ("more", "best"),
    [
        pytest.param({}, 6, id="evaluated more often than saved"),
        pytest.param({"eval_steps": 3, "save_steps": 4}, 6, id="at other steps than saved"),
        pytest.param({"eval_steps": None, "logging_steps": 2}, 6, id="by the default interval"),
        pytest.param({"save_strategy": "epoch", "eval_steps": 3}, 6, id="saved by epochs"),
        pytest.param({"save_steps": 0, "save_seconds": 1000.0}, 6, id="saved by the clock"),
        pytest.param({"save_strategy": "best"}, 6, id="the best alone"),
        pytest.param({"eval_strategy": "epoch"}, 4, id="evaluated by epochs"),
    ],
)
def test_the_model_is_that_of_the_best_evaluation_wherever_saves_fall(
    more: dict[str, Any], best: int, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, kept = best_run(make, {2: 1.0, 3: 1.0, 4: 2.0, 6: 5.0, 8: 3.0} if best == 6 else {4: 5.0, 8: 3.0}, **more)
    ours.train()
    state = ours.state
    assert weight(ours) == kept.weights[best]
    assert f"loaded the best model: step {best}, score 5" in capsys.readouterr().out
    assert (state.best_global_step, Path(str(state.best_model_checkpoint)).name) == (best, f"checkpoint-{best}")
    assert f"checkpoint-{best}" in names(tmp_path / "run") and len(names(tmp_path / "run")) <= 2


def test_a_best_model_that_could_not_be_saved_is_not_said_to_be_loaded(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[Any] = []

    def full() -> None:
        limits.append(full_disk(100))
        limits[0].__enter__()

    ours, kept = best_run(
        make,
        {2: 1.0, 4: 2.0, 6: 9.0, 8: 1.0},
        {6: full, 7: lambda: (ours.checkpoints.finish(), limits[0].__exit__(None, None, None))},
    )
    ours.train()
    state = ours.state
    said = capsys.readouterr().out
    assert "no checkpoint of step 6" in said and "loaded the best model: step 4, score 2" in said
    assert weight(ours) == kept.weights[4] and (state.best_global_step, state.best_metric) == (4, 2.0)


def test_a_best_model_that_is_damaged_is_not_loaded(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = tmp_path / "run" / "checkpoint-2" / "model.safetensors"

    def flip() -> None:
        ours.checkpoints.finish()
        content = bytearray(best.read_bytes())
        content[-1] ^= 0x40
        best.write_bytes(content)

    ours, kept = best_run(make, {2: 9.0}, {8: flip})
    ours.train()
    said = capsys.readouterr().out
    assert "the best model cannot be loaded" in said and "differs from what was saved" in said
    assert "keeps the weights of the last step, 8" in said and weight(ours) == kept.weights[8]
    ours.save_model()


def test_a_resumed_run_says_that_its_best_model_is_gone_and_seeks_another(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = best_run(make, {2: 9.0, 4: 1.0}, max_steps=4)
    first.train()
    first.close()
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    again, kept = best_run(make, {6: 5.0, 8: 4.0}, resume_from_checkpoint="auto")
    again.train()
    said = capsys.readouterr().out
    assert "the best evaluation so far, step 2, score 9, has no checkpoint" in said
    assert "loaded the best model: step 6, score 5" in said and weight(again) == kept.weights[6]


def test_adapters_are_not_resumed_on_another_base_model(make: Make, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "base", "llama", False, vocab_size=301))
    shutil.copytree(tmp_path / "base", tmp_path / "moved")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[1, 2] += 1e-3
    model.save_pretrained(tmp_path / "other")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    first = make(model=str(tmp_path / "base"), data=TOKENS, peft_config=adapters)
    step(first)
    saved = first.save_checkpoint()
    first.close()
    words = r"adapters for another base model, whose model\.layers\.0\.mlp\.up_proj\.weight has other values"
    for given in ("other", model):
        base = str(tmp_path / given) if isinstance(given, str) else given
        with pytest.raises(UserError, match=words):
            make("next", model=base, data=TOKENS, peft_config=adapters, resume_from_checkpoint=str(saved))
        ours = make("later", model=base, data=TOKENS, peft_config=adapters)
        with pytest.raises(UserError, match=words):
            ours.train(saved)
        ours.close()
    for base in (str(tmp_path / "moved"), AutoModelForCausalLM.from_pretrained(tmp_path / "base").float()):
        again = make("last", model=base, data=TOKENS, peft_config=adapters, resume_from_checkpoint=str(saved))
        assert again.state.global_step == 1
        again.close()
