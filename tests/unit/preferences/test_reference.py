"""The model before training: its log-probabilities are kept, and computed again whenever anything that decides them
has changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from harness import PreferenceArguments, Preferences, Trainer, TrainingArguments, UserError
from harness.data.tokenizer import ByteTokenizer
from tests.support.models import model_of
from tests.support.preferences import PAIRS, log_probs


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    save(tmp_path / "model")
    yield tmp_path / "model"


def save(folder: Path, factor: float = 1.0) -> None:
    made = model_of("llama", num_hidden_layers=1)
    with torch.no_grad():
        made.lm_head.weight[5] *= factor
    made.save_pretrained(folder)


def trainer_of(model: Path, rows: Any = PAIRS, kind: str = "dpo", **more: Any) -> Trainer:
    settings = {"max_steps": 1, "save_steps": 0, "overwrite_output_dir": True, "verify_plan": "off"}
    arguments = TrainingArguments(str(model.parent / "run"), per_device_train_batch_size=4, **settings)
    objective = Preferences(PreferenceArguments(preference=kind))
    return Trainer(str(model), arguments, rows, rows, processing_class=ByteTokenizer(), objective=objective, **more)


def test_log_probabilities_are_those_of_the_saved_model(model: Path) -> None:
    trainer = trainer_of(model)
    trainer.training_step()  # moves the weights
    whole = AutoModelForCausalLM.from_pretrained(model).double()
    with torch.no_grad():
        wanted = [
            [log_probs(whole, row["prompt"], row[name])[0].sum() for name in ("chosen", "rejected")] for row in PAIRS
        ]
    samples: Any = trainer.train_dataset
    np.testing.assert_allclose(samples.reference, np.array(wanted), rtol=1e-5)
    moved = trainer.predict(samples).predictions
    assert moved.shape == (8, 2) and np.abs(moved - np.array(wanted)).max() > 1e-4
    with pytest.raises(UserError, match="compares with the model before training, so give all data that is evaluated"):
        trainer.evaluate(PAIRS[:4])
    trainer.close()


def test_they_are_read_again_until_weights_or_data_change(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(**more: Any) -> list[str]:
        trainer_of(model, **more).close()
        lines = capsys.readouterr().out.splitlines()
        return [line.split(": ")[1].split(" ")[0] for line in lines if line.startswith("log-probabilities")]

    assert said() == ["computed", "read"]  # of the training data, then of the same rows for evaluation
    assert said() == ["read", "read"]
    assert said(kind="ipo") == ["read", "read"]
    assert said(peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")) == ["read", "read"]
    assert said(kind="orpo") == []
    assert said(rows=[*PAIRS[:-1], {**PAIRS[-1], "chosen": "?"}])[0] == "computed"
    save(model, factor=1.5)  # the same files of the same size, one row of one weight changed
    assert said() == ["computed", "read"]
    assert said() == ["read", "read"]


def test_the_model_before_training_has_the_base_models_own_head_and_embeddings(model: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, config)
    arguments = TrainingArguments(str(model.parent / "run"), per_device_train_batch_size=4, max_steps=1, save_steps=0)

    def trained() -> Any:
        objective = Preferences(PreferenceArguments(preference="dpo"))
        trainer = Trainer(adapted, arguments, PAIRS, processing_class=ByteTokenizer(), objective=objective)
        trainer.training_step()
        return trainer.train_dataset

    with torch.no_grad(), adapted.disable_adapter():
        before = [
            [log_probs(base, row["prompt"], row[name])[0].sum() for name in ("chosen", "rejected")] for row in PAIRS
        ]
    np.testing.assert_allclose(trained().reference, np.array(before), rtol=1e-5)
    with torch.no_grad():
        base.lm_head.weight[5] *= 2  # the copy that is trained, as peft lets it stand in the base's place
    with pytest.raises(UserError, match=r"modules_to_save: lm_head.weight was trained before, .* merge the adapters"):
        trained()
