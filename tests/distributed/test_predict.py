"""Predictions, metrics and a checkpoint named at train(): alike in every layout, and as transformers has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, EvalPrediction

from harness import Trainer, TrainerCallback, UserError
from tests.support.ranks import run_ranks
from tests.support.training import Job, arguments_of, rows, tiny_model

pytestmark = pytest.mark.ranks

SAMPLES = 5  # no multiple of the micro-batch, nor of the data ranks


class Moments(TrainerCallback):
    """Counts what is called."""

    predicted = 0

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.predicted += 1


def most_likely(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def accuracy(prediction: EvalPrediction) -> dict[str, Any]:
    assert dist.get_rank() == 0
    right = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": np.mean(right), "eval_samples_seen": len(right)}


def predicted(job: Job, folder: str) -> dict[str, Any]:
    trainer = Trainer(job.model, arguments_of(job, f"{folder}/{job.layout}"), rows(), rows()[:2], callbacks=[Moments])
    found = trainer.predict(rows(masked=True)[:SAMPLES])
    moments = trainer.pop_callback(Moments)
    trainer.close()
    settings = arguments_of(job, f"{folder}/own-{job.layout}")
    trainer = Trainer(
        job.model,
        settings,
        rows(),
        rows()[:SAMPLES],
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=most_likely,
    )
    metrics = trainer.evaluate()
    small = trainer.predict(rows()[:1]).predictions.shape
    trainer.close()
    return {"found": found, "calls": moments.predicted, "metrics": metrics, "small": small}


def predicted_in(jobs: list[Job], folder: str) -> list[dict[str, Any]]:
    return [predicted(job, folder) for job in jobs]


@pytest.mark.parametrize(
    "layouts",
    [("pp2tp2z1",), pytest.param(("tp2dp2z3", "pp2dp2z0"), marks=pytest.mark.thorough)],
    ids=["first", "others"],
)
def test_predictions_are_those_of_transformers_in_every_layout(layouts: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", False, vocab_size=301)
    data = rows(masked=True)[:SAMPLES]
    ids = torch.tensor([row["input_ids"] for row in data])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(ids).logits.numpy()
    right = np.mean(logits.argmax(-1)[:, :-1] == ids.numpy()[:, 1:])
    for results in run_ranks(4, predicted_in, [Job(model, layout) for layout in layouts], str(tmp_path)):
        for result in results:
            assert result["found"].predictions == pytest.approx(logits, abs=2e-5)
            assert result["found"].label_ids.tolist() == [row["labels"] for row in data]
            assert {"test_loss", "test_samples"} <= result["found"].metrics.keys()
            assert result["metrics"]["eval_accuracy"] == pytest.approx(right)
            assert result["metrics"]["eval_samples_seen"] == SAMPLES
            assert (result["calls"], result["small"]) == (1, (1, ids.shape[1]))


def named_at_train(job: Job, folder: str) -> tuple[list[float], list[float], str]:
    """The losses of a run; those after its first checkpoint, named later; what a start without a name says."""
    losses = []
    settings = arguments_of(job, folder, max_steps=4, save_steps=2, logging_steps=1)
    for checkpoint in (None, f"{folder}/checkpoint-2", None):
        trainer = Trainer(job.model, settings, rows())
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
            losses.append([logs["loss"] for logs in trainer.state.log_history if "loss" in logs])
        except UserError as error:
            refusal = str(error)
        assert trainer.model.config.vocab_size == 301
        trainer.close()
    return losses[0], losses[1], refusal


def test_a_checkpoint_named_at_train_is_gone_on_from_to_the_bit(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", False, vocab_size=301)
    for whole, rest, refusal in run_ranks(2, named_at_train, Job(model, "pp2z1"), str(tmp_path / "run")):
        assert len(whole) == 4 and rest == whole[2:]
        assert "already holds a run" in refusal
