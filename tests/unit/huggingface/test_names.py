"""What HuggingFace's Trainer takes and calls, and ours does not, is refused in one line that says what to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Trainer, TrainingArguments, UserError
from harness.huggingface import names
from harness.training.engine.losses import LogitsLoss, logits_loss, targets


def overrides(name: str) -> type[Trainer]:
    return type("Mine", (Trainer,), {name: lambda self, *args, **kwargs: None})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("compute_loss", "loss_fn"),
        ("prediction_step", "evaluate"),
        ("create_optimizer", "DeepSpeed JSON"),
        ("get_train_dataloader", "data_collator"),
        ("_maybe_log_save_evaluate", "TrainerCallback"),
    ],
)
def test_a_method_that_is_never_called_is_refused_by_name(name: str, remedy: str) -> None:
    with pytest.raises(UserError, match=f"Mine.{name} .*{remedy}"):
        overrides(name)(model="tiny-llama", args=TrainingArguments())


def test_a_training_step_that_wants_a_batch_is_refused_and_one_that_does_not_is_called() -> None:
    class Batchwise(Trainer):
        def training_step(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
            return None

    class Counting(Trainer):
        def training_step(self) -> Any:
            return super().training_step()

        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None) -> dict[str, float]:
            return super().evaluate(eval_dataset)

    with pytest.raises(UserError, match=r"Batchwise\.training_step"):
        Batchwise(model="tiny-llama", args=TrainingArguments())
    with pytest.raises(UserError, match="has no_such_file"):  # as far as that: its methods are ours
        Counting(model="tiny-llama", args=TrainingArguments(deepspeed_config="has no_such_file"))


def test_our_own_class_is_spared_the_import_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "methods_of_transformers", lambda: pytest.fail("it takes seconds"))
    with pytest.raises(UserError, match="has no_such_file"):
        Trainer(model="tiny-llama", args=TrainingArguments(deepspeed_config="has no_such_file"))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("optimizer_cls_and_kwargs", "optimizers="),
        ("tokenizer", "processing_class"),
        ("train_datasets", "train_dataset"),
    ],
)
def test_an_argument_that_is_not_taken_is_one_line(name: str, remedy: str) -> None:
    with pytest.raises(UserError, match=f"takes no {name}: .*{remedy}"):
        Trainer(model="tiny-llama", args=TrainingArguments(), **{name: (3, None)})  # type: ignore[arg-type]


def test_huggingfaces_own_defaults_are_taken(tmp_path: Path) -> None:
    theirs = {"data_collator": None, "callbacks": None, "model_init": None, "optimizers": (None, None)}
    points = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(8)]
    args = TrainingArguments(str(tmp_path), max_steps=1, save_steps=0, per_device_train_batch_size=4)
    trainer = Trainer([torch.nn.Linear(2, 1)], args, points, loss_fn=torch.nn.functional.mse_loss, **theirs)  # type: ignore[arg-type]
    assert trainer.train().global_step == 1
    trainer.close()
    with pytest.raises(UserError, match="takes no eval_datset"):
        Trainer([torch.nn.Linear(2, 1)], args, eval_datset=None)


@pytest.mark.parametrize(
    ("name", "remedy"), [("torch_compile", "compile.*enabled.* in the DeepSpeed JSON"), ("max_step", "max_steps")]
)
def test_a_setting_that_is_not_known_is_one_line(name: str, remedy: str) -> None:
    with pytest.raises(UserError, match=f"takes no {name}: .*{remedy}"):
        TrainingArguments(**{name: 1})


def test_a_loss_that_is_no_number_is_told() -> None:
    logits, labels = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(UserError, match=r"shape \(2,\)"):
        LogitsLoss(lambda logits, labels: logits.sum((1, 2)))(logits, targets(labels, 1.0, 2))
    with pytest.raises(UserError, match="both given"):
        logits_loss(lambda *_: None, lambda *_: None)
