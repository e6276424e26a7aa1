"""What is written for HuggingFace's Trainer: callbacks with its keywords, and several data sets to evaluate."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from harness import Trainer, TrainerCallback, TrainingArguments, UserError
from harness.console import Console
from harness.data.tokenizer import load_tokenizer
from harness.huggingface.callbacks import accept_callback
from harness.topology.layout import Layout
from harness.training.callbacks import TrainerControl, instance
from tests.support.training import rows


class Theirs(transformers.TrainerCallback):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.moments: list[Any] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moments.append((state.num_train_epochs, state.logging_steps, state.is_local_process_zero))

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        self.moments.append(optimizer.param_groups[0]["lr"] == kwargs["lr_scheduler"].get_last_lr()[0])
        control.should_log = state.global_step == 1
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        self.moments.append((logs["step"], sum(p.numel() for p in model.parameters()) > 0))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any) -> None:  # no **kwargs: these alone
        self.moments.append(next(iter(metrics)))


def settings(folder: Path, **changes: Any) -> TrainingArguments:
    every_step = {"max_steps": 3, "eval_steps": 1, "logging_steps": 3, "save_steps": 0}
    return TrainingArguments(output_dir=str(folder), per_device_train_batch_size=4, **{**every_step, **changes})


def test_a_callback_of_theirs_and_several_evaluation_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets, theirs = {"a": rows()[:3], "b": rows(masked=True)[:2]}, Theirs()
    worst = transformers.EarlyStoppingCallback(early_stopping_patience=2)  # a falling loss, of which more is better
    args = settings(tmp_path, metric_for_best_model="eval_b_loss", greater_is_better=True, max_steps=9)
    trainer = Trainer("tiny-llama", args, rows(), sets, callbacks=[theirs, worst])
    trainer.train()
    state = trainer.state
    of_step = [["eval_a_loss", "eval_b_loss", (step, True)] for step in (1, 2, 3)]  # each evaluation is logged, too
    steps = [True, (1, True), *of_step[0], True, *of_step[1], True, (3, True), *of_step[2], (3, True)]
    assert theirs.moments == [(5, 3, True), *steps]
    assert (state.global_step, state.best_global_step) == (3, 1)  # the first is the best, two do not improve
    written = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert state.best_metric == written[0]["eval_b_loss"] and len(written) == 3
    again = trainer.evaluate()
    assert again["eval_a_loss"] == written[2]["eval_a_loss"] == trainer.evaluate("a")["eval_loss"]
    assert trainer.evaluate(sets["b"], metric_key_prefix="test")["test_loss"] == again["eval_b_loss"]
    assert "step 3: test loss" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"evaluate\('c'\): eval_dataset has no data set of that name"):
        trainer.evaluate("c")
    trainer.close()


def test_text_is_tokenised_whenever_it_is_given(tmp_path: Path) -> None:
    text = [{"text": "a line of text, and another one"}] * 9
    args = settings(tmp_path, block_size=32, eval_steps=None)
    trainer = Trainer("tiny-llama", args, text, text, processing_class=load_tokenizer("bytes", tmp_path))
    metrics = trainer.evaluate()
    found = trainer.predict(text)
    assert found.predictions.shape[:2] == (metrics["eval_samples"], 32)
    assert found.metrics["test_loss"] == metrics["eval_loss"] == trainer.evaluate({"a": text})["eval_a_loss"]
    trainer.close()


@pytest.mark.parametrize(
    ("sets", "changes", "words"),
    [
        ({"a": rows()}, {"early_stopping_patience": 1}, "metric_for_best_model='a_loss'"),
        ({"a": rows(), "b": (row for row in rows())}, {}, r"eval_dataset\['b'\]: generator is not map-style"),
        ({}, {}, "eval_dataset is an empty dict: give a data set"),
    ],
)
def test_sets_that_cannot_be_evaluated_are_refused_before_a_model_is_built(
    sets: Any, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        Trainer("tiny-llama", settings(tmp_path, **changes), rows(), sets)


@pytest.mark.parametrize("base", [TrainerCallback, transformers.TrainerCallback])
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda self, args, state, control, train_dataloader=None, **kwargs: None, "takes train_dataloader: .*train_d"),
        (
            lambda self, args, state, control, tokenizer=None, **kwargs: None,
            "takes tokenizer: name it processing_class",
        ),
    ],
)
def test_a_keyword_or_a_moment_that_is_not_there_is_refused_when_the_callback_is_added(
    base: type[Any], method: Any, words: str
) -> None:
    with pytest.raises(UserError, match=f"callback Mine.on_log {words}"):
        accept_callback(instance(type("Mine", (base,), {"on_log": method})))
    with pytest.raises(UserError, match=r"callback Mine.on_substep_end is never called here: use on_step_end"):
        accept_callback(instance(type("Mine", (base,), {"on_substep_end": lambda *_, **__: None})))
    assert accept_callback(instance(base))


def test_what_control_cannot_do_is_refused() -> None:
    control = TrainerControl()
    control.should_epoch_stop = False
    with pytest.raises(UserError, match="set should_training_stop"):
        control.should_epoch_stop = True


class Saves(TrainerCallback):
    """Notes what it is told of logs and checkpoints."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, float]] = []
        self.saved: list[tuple[int, str]] = []
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.losses.append(kwargs["record"].loss)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "loss" in kwargs["logs"]:
            self.logged.append((state.global_step, kwargs["logs"]["loss"]))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append((state.global_step, kwargs["checkpoint"].name))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer that has trained, what train() returned, and what a callback was told."""
    told = Saves()
    args = settings(tmp_path_factory.mktemp("done"), max_steps=5, logging_steps=2, save_steps=1, eval_steps=None)
    console = Console(out=io.StringIO(), error=io.StringIO(), speaks=True)
    trainer = Trainer("tiny-llama", args, rows(), callbacks=[told], console=console)
    yield trainer, trainer.train(), told
    trainer.close()


def test_training_returns_what_theirs_does(done: Any) -> None:
    trainer, output, told = done
    assert isinstance(output, transformers.trainer_utils.TrainOutput)
    assert output.global_step == 5
    assert output.training_loss == output.metrics["train_loss"] == pytest.approx(sum(told.losses) / 5)
    assert output.metrics["train_steps_per_second"] * output.metrics["train_runtime"] == pytest.approx(5)
    assert output.metrics["train_samples_per_second"] == pytest.approx(4 * output.metrics["train_steps_per_second"])
    assert output.metrics["epoch"] == trainer.state.epoch


def test_a_logged_loss_is_the_mean_since_the_last_log(done: Any) -> None:
    _, _, told = done
    losses = told.losses
    means = {2: sum(losses[:2]) / 2, 4: sum(losses[2:4]) / 2, 5: losses[4]}
    assert dict(told.logged) == pytest.approx(means)


def test_a_checkpoint_is_told_with_the_step_that_it_holds(done: Any) -> None:
    _, _, told = done
    assert told.saved == [(step, f"checkpoint-{step}") for step in range(1, 6)]


def test_a_callback_that_reports_finds_no_search_in_the_state(done: Any) -> None:
    trainer, _, _ = done
    callback = object.__new__(transformers.integrations.TensorBoardCallback)  # its own __init__ needs tensorboard
    callback.logging_dir, callback._SummaryWriter, written = None, None, []
    callback.tb_writer = SimpleNamespace(add_text=lambda *args: written.append(args[0]))
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    assert written[0] == "args"
    assert (trainer.state.is_hyper_param_search, trainer.state.trial_name, trainer.state.trial_params) == (
        False,
        None,
        None,
    )


def test_metrics_and_state_are_written_where_theirs_are(done: Any) -> None:
    trainer, output, _ = done
    folder = Path(trainer.args.output_dir)
    trainer.log_metrics("train", output.metrics)
    trainer.save_metrics("train", output.metrics)
    trainer.save_metrics("eval", {"eval_loss": 2.5})
    trainer.save_state()
    assert "***** train metrics *****\n  epoch " in trainer.run.console.out.getvalue()
    assert json.loads((folder / "train_results.json").read_text()) == pytest.approx(output.metrics)
    assert json.loads((folder / "all_results.json").read_text()) == pytest.approx({**output.metrics, "eval_loss": 2.5})
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 5 and [logs["step"] for logs in state["log_history"]] == [2, 4, 5, 5]
    assert output.metrics.items() <= state["log_history"][-1].items()
    assert trainer.is_world_process_zero() and trainer.is_local_process_zero()


def test_a_second_call_says_that_nothing_is_left(done: Any) -> None:
    trainer, _, _ = done
    assert trainer.train().global_step == 5
    assert "all 5 steps are done, so nothing is trained" in trainer.run.console.out.getvalue()


def test_other_methods_of_theirs_are_refused_in_a_line(done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, _ = done
    for name in ("create_optimizer", "compute_loss", "hyperparameter_search"):
        assert not hasattr(trainer, name)
        with pytest.raises(UserError, match=f"Trainer.{name} is a method of HuggingFace's Trainer: "):
            getattr(trainer, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = trainer.nothing
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"push_to_hub: .*; the model is in .*: `hf upload` can send it"):
        trainer.push_to_hub()


def test_a_model_card_is_written_and_what_others_wrote_stays(done: Any) -> None:
    trainer, _, _ = done
    path = Path(trainer.args.output_dir) / "README.md"
    trainer.log({"eval_loss": 2.5})
    trainer.log({"train_loss": 3.5})
    trainer.create_model_card(finetuned_from="base/model", tasks="text-generation", dataset_tags=["a/b"], language="en")
    card = path.read_text()
    assert card.startswith("---\n") and "base_model: base/model" in card and "pipeline_tag: text-generation" in card
    assert "- eval_loss: 2.5\n" in card and "train_loss" not in card
    for mine in (b"mine", "größe".encode("latin-1")):
        path.write_bytes(mine)
        trainer.create_model_card()
        assert path.read_bytes() == mine


def test_data_loaders_have_the_batches_that_training_and_evaluation_read(tmp_path: Path) -> None:
    args = settings(tmp_path, eval_steps=None)
    trainer = Trainer("tiny-llama", args, rows(), {"a": rows()[:6], "b": rows()[:1]})
    looked_at = [batch["input_ids"] for batch in trainer.get_train_dataloader()]
    read = [trainer.stream.next_step()[0][0] for _ in looked_at]
    assert all(map(torch.equal, looked_at, read)) and len(looked_at) == len(trainer.get_train_dataloader()) == 2
    evaluated = list(trainer.get_eval_dataloader("a"))
    assert [batch["labels"].shape[0] for batch in evaluated] == [4, 2]
    assert evaluated[0]["input_ids"].tolist() == [row["input_ids"] for row in rows()[:4]]
    assert [batch["labels"].shape[0] for batch in trainer.get_eval_dataloader(rows()[:5])] == [4, 1]
    with pytest.raises(UserError, match="needs one eval_dataset"):
        trainer.get_eval_dataloader()
    layout = Layout(dp_size=4, cp_size=2)  # ranks 2 and 3 share the sequences of every second micro-batch
    trainer.run.groups = replace(trainer.run.groups, layout=layout, coordinate=layout.coordinate(2))
    assert [batch["labels"].shape[0] for batch in trainer.get_eval_dataloader("a")] == [2]
    trainer.close()


def test_what_scripts_read_of_the_trainer_is_there_or_answered(done: Any) -> None:
    trainer, _, _ = done
    assert trainer.model_wrapped is trainer.engine.deepspeed and trainer.optimizer is trainer.model_wrapped.optimizer
    assert trainer.get_learning_rates() == trainer.lr_scheduler.get_last_lr()
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in trainer.model.parameters())
    assert trainer.evaluate(rows()[:4], [], "mine")["mine_runtime"] > 0
    assert trainer.predict(rows()[:1], ignore_keys=None).metrics["test_samples_per_second"] > 0
    assert trainer.state.log_history[-1]["mine_samples"] == 4
    trainer.log({"mine": 1.0})
    assert trainer.state.log_history[-1] == {"mine": 1.0, "step": 5, "epoch": trainer.state.epoch}
    for owner, name, words in ((trainer, "accelerator", "model_wrapped"), (trainer.state, "total_flos", "6 x")):
        with pytest.raises(AttributeError, match=f"{name} is .* of HuggingFace's .*{words}"):
            getattr(owner, name)


def test_what_scripts_read_of_the_arguments_is_there(tmp_path: Path) -> None:
    args = settings(tmp_path, do_train=True, ddp_timeout=1800, warmup_steps=0.5)
    assert (args.do_train, args.ddp_timeout, args.push_to_hub, args.deepspeed) == (True, 1800, False, None)
    assert (args.world_size, args.process_index, args.n_gpu, str(args.device)) == (1, 0, 0, "cpu")
    assert args.should_log and args.should_save and args.parallel_mode.value == "not_parallel"
    assert args.get_warmup_steps(10) == 5 and args.train_batch_size == args.eval_batch_size == 4
    assert json.loads(args.to_json_string())["max_steps"] == args.to_sanitized_dict()["max_steps"] == 3
    with args.main_process_first(desc="tokenising"):
        pass
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = args.nothing
