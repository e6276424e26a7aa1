"""The best evaluation's checkpoint is kept and loaded; a run without a better one stops; a resumed run knows both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from harness import Trainer
from harness.checkpoint.directories import read_progress
from tests.support.ranks import run_ranks
from tests.support.training import Job, arguments_of, rows, second_host, tiny_model
from tests.support.workers import refusal_of

pytestmark = pytest.mark.ranks

SCORES = [1.0, 3.0, 2.0, 2.5, 9.0]
"""Of the evaluations after steps 1, 2, ...: the second is the best of those that a patience of 2 allows."""


class Judged(Trainer):
    """Adds a score of its own to an evaluation, as scripts do; it is not the same on every rank."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        metrics = super().evaluate(*args, **kwargs)
        return {**metrics, "eval_score": metrics["eval_score"] * (-1) ** dist.get_rank()}


def trained(job: Job, folder: str, **changes: Any) -> dict[str, Any]:
    wanted = {
        "max_steps": 5,
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "early_stopping_patience": 2,
    }
    trainer: Trainer

    def score(_: Any) -> dict[str, float]:
        return {"score": SCORES[trainer.state.global_step - 1]}

    settings = arguments_of(job, folder, **{**wanted, **changes})
    trainer = Judged(job.model, settings, rows(), rows()[:2], compute_metrics=score)
    trainer.train()
    state = trainer.state
    of_best = [row["eval_loss"] for row in state.log_history if row["step"] == 2 and "eval_loss" in row]
    if of_best:  # a resumed run has no row of it
        assert trainer.evaluate()["eval_loss"] == of_best[0]  # by the weights that were loaded
    trainer.save_model()
    trainer.close()
    return {
        "steps": state.global_step,
        "best": (state.best_metric, state.best_global_step, Path(state.best_model_checkpoint or "").name),
    }


def stopped_and_resumed(job: Job, folder: str) -> list[dict[str, Any]]:
    with second_host():
        whole = trained(job, f"{folder}/whole")
    short = trained(job, f"{folder}/short", max_steps=3, save_total_limit=None)
    resumed = trained(job, f"{folder}/short", resume_from_checkpoint="auto", save_total_limit=None)
    return [whole, short, resumed]


# ZeRO-3 keeps the norms whole on each rank, and gathers the matrices
CUT = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "config"),
    [("dp2z3", CUT), ("pp2z1", {})],
    ids=["dp2z3", "pp2z1"],
)
def test_the_best_model_is_kept_and_loaded_and_early_stopping_goes_on_after_a_resume(
    layout: str, config: dict[str, Any], tmp_path: Path
) -> None:
    job, folder = Job(tiny_model(tmp_path / "m", "llama", False, vocab_size=301), layout, config), tmp_path / "runs"
    for whole, short, resumed in run_ranks(2, stopped_and_resumed, job, str(folder)):
        assert whole == {"steps": 4, "best": (3.0, 2, "checkpoint-2")}
        assert (short["steps"], resumed) == (3, whole)
    kept = sorted(path.name for path in (folder / "whole").glob("checkpoint-*"))
    assert kept == ["checkpoint-2", "checkpoint-4"]
    exported, best, last = (
        load_file(folder / "whole" / name / "model.safetensors") for name in ("", "checkpoint-2", "checkpoint-4")
    )
    assert all(torch.equal(exported[name], best[name]) for name in best)
    assert any(not torch.equal(exported[name], last[name]) for name in last)


def model_alone(job: Job, folder: str) -> str:
    trainer = Trainer(job.model, arguments_of(job, folder, max_steps=2, save_steps=2, save_only_model=True), rows())
    trainer.train()
    trainer.close()
    return refusal_of(lambda: Trainer(job.model, arguments_of(job, folder, resume_from_checkpoint="auto"), rows()))


def test_a_checkpoint_of_the_model_alone_is_smaller_and_no_run_goes_on_from_it(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", False, vocab_size=301)
    for refusal in run_ranks(2, model_alone, Job(model, "dp2z1"), str(tmp_path / "run")):
        assert "contains only the model (--save_only_model)" in refusal
    saved = tmp_path / "run/checkpoint-2"
    assert [path.name for path in saved.glob("*.safetensors")] == ["model.safetensors"]
    assert read_progress(saved).optimizer_states == []
