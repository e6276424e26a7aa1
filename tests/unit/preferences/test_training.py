"""Training on preferences in one process is that of the formulas in float64: losses, gradients and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch.utils.data import IterableDataset

from harness import PreferenceArguments, Preferences, Trainer, TrainingArguments, UserError
from harness.data.tokenizer import ByteTokenizer
from tests.support.models import model_of
from tests.support.preferences import DEFAULTS, FLAGS, LABELLED, PAIRS, pair_step, trained


@pytest.fixture(autouse=True)
def prepared_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def trainer_of(kind: str, output_dir: Path, *, micro: int = 2, zero: int = 0, model: Any = None, **of: Any) -> Trainer:
    settings = {name: of.pop(name) for name in list(of) if name not in FLAGS and name != "peft_config"}
    train = settings.pop("train", LABELLED if kind == "kto" else PAIRS)
    peft = {name: of.pop(name) for name in list(of) if name == "peft_config"}
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": zero},
    }
    arguments = TrainingArguments(
        str(output_dir),
        deepspeed_config=config,
        **{
            "max_steps": 3,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "adam_beta2": 0.95,
            "save_steps": 0,
            "verify_plan": "off",
            **settings,
        },
    )
    rows = LABELLED if kind == "kto" else PAIRS
    given = PreferenceArguments(preference=kind, **{FLAGS[name]: value for name, value in of.items()})
    return Trainer(
        model_of("llama") if model is None else model,
        arguments,
        train,
        rows,
        processing_class=ByteTokenizer(),
        objective=Preferences(given),
        **peft,
    )


def steps_of(trainer: Trainer) -> list[dict[str, float]]:
    trainer.train()
    trainer.close()
    text = (trainer.run.spec.output_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("kind", "micro", "zero", "of"),
    [
        pytest.param("dpo", 2, 0, {"beta": 0.3, "smoothing": 0.1}, id="dpo"),
        pytest.param("dpo", 1, 3, {}, id="dpo-zero3", marks=pytest.mark.thorough),
        pytest.param("ipo", 4, 1, {"beta": 0.5}, id="ipo", marks=pytest.mark.thorough),
        pytest.param("simpo", 2, 2, {"beta": 2.0, "gamma": 1.0}, id="simpo"),
        pytest.param("orpo", 1, 0, {"beta": 0.2}, id="orpo", marks=pytest.mark.thorough),
        pytest.param("kto", 2, 0, {"beta": 0.5, "desirable": 1.5, "undesirable": 0.5}, id="kto"),
    ],
)
def test_training_is_that_of_the_formulas(
    kind: str, micro: int, zero: int, of: dict[str, float], tmp_path: Path
) -> None:
    found = steps_of(trainer_of(kind, tmp_path / "run", micro=micro, zero=zero, **of))
    wanted = trained(model_of("llama"), kind, steps=3, batch=4, micro=4 // micro, group=micro, **of)
    for row, expected in zip(found, wanted, strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=2e-4, abs=2e-5)
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-6)


def test_dropout_of_the_model_and_of_adapters_is_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapters = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model_of("llama", attention_dropout=0.5), adapters)
    trainer = trainer_of("simpo", tmp_path / "run", model=model)
    found = steps_of(trainer)
    wanted = trained(model.eval(), "simpo", steps=3, batch=4)
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted], rel=2e-6)
    assert "dropout is off, as in TRL: attention_dropout 0.5 of the model's config" in capsys.readouterr().out
    assert trainer.run.trainable.causal.source.config.attention_dropout == 0.5  # as it is exported


def test_a_checkpoint_is_resumed_with_the_objective_that_it_was_trained_on(tmp_path: Path) -> None:
    model, then = model_of("llama", num_hidden_layers=1), {"resume_from_checkpoint": "auto", "max_steps": 2}
    steps_of(trainer_of("dpo", tmp_path / "run", model=model, max_steps=1, save_steps=1))
    of_dpo = "--preference dpo --preference_beta 0.1 --preference_label_smoothing 0.0"
    for kind, more, ours in (
        ("dpo", {"beta": 0.3}, of_dpo.replace("0.1", "0.3")),
        ("ipo", {}, "--preference ipo --preference_beta 0.1"),
    ):
        with pytest.raises(UserError) as caught:
            trainer_of(kind, tmp_path / "run", model=model, **then, **more).train()
        assert f"checkpoint-1 was trained on {of_dpo}, but this run on {ours}: resume with" in str(caught.value)
    assert len(steps_of(trainer_of("dpo", tmp_path / "run", model=model, beta=0.1, **then))) == 2


def test_an_iterable_data_set_is_streamed_in_its_order(tmp_path: Path) -> None:
    class Pairs(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(PAIRS)

    first, *_ = steps_of(trainer_of("simpo", tmp_path / "run", train=Pairs(), max_steps=1))
    model = model_of("llama").double()
    loss, metrics = pair_step(model, model, "simpo", PAIRS[:4], DEFAULTS)
    assert first["loss"] == pytest.approx(loss.item(), rel=2e-6)
    assert {name: first[name] for name in metrics} == pytest.approx(metrics, rel=2e-4, abs=2e-5)
    with pytest.raises(UserError, match="an IterableDataset does not work with --preference dpo, which computes"):
        trainer_of("dpo", tmp_path / "other", train=Pairs()).train()
