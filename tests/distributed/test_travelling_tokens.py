"""Experts dealt among data-parallel ranks: tokens travel, and training is that of one process.

Four ranks are launched once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness import Trainer
from tests.distributed.ranks import run_ranks
from tests.distributed.test_experts import FAMILIES
from tests.distributed.training import STEPS, Curve, Job, arguments_of, reference, rows, tiny_model, train_all, worst

pytestmark = pytest.mark.ranks

LOSS, NORM = 2e-6, 2e-5
SAVED_AT = 2
LAYOUTS = [
    ("mixtral", "dp4z0", 2),
    ("mixtral", "dp4z2", 4),
    ("mixtral", "tp2dp2z1", 4),
    ("odd", "pp2dp2z0", 2),
    ("deepseek_v3", "pp2dp2z1", 2),
]
SAVED, RESUMED = ("mixtral", "dp4z1", 2), [("mixtral", "pp2dp2z1", 1), ("mixtral", "tp2dp2z0", 4)]


def spread(size: int) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": size}}


def saved_and_resumed(saved: Job, resumed: list[Job], folder: str) -> list[Curve]:
    """Train one job and save in the middle; go on from there in other layouts. The curves of all."""
    curves: list[Curve] = []
    checkpoint = f"{folder}/saved/checkpoint-{SAVED_AT}"
    for number, job in enumerate([saved, *resumed]):
        options = {"resume_from_checkpoint": checkpoint} if number else {"save_steps": SAVED_AT}
        place = f"{folder}/resumed-{number}" if number else f"{folder}/saved"
        trainer = Trainer(job.model, arguments_of(job, place, **options), train_dataset=rows())
        trainer.train()
        trainer.save_model()
        trainer.close()
        lines = Path(place, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        curves.append([(record["loss"], record["grad_norm"]) for record in map(json.loads, lines)])
    return curves


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank brings back."""

    curves: list[Curve]
    resumed: list[Curve]


def everything(jobs: list[Job], saved: Job, resumed: list[Job], folder: str) -> Outcome:
    """What every rank does."""
    return Outcome(curves=train_all(jobs, folder), resumed=saved_and_resumed(saved, resumed, folder))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("travelling")
    sizes = {**FAMILIES, "odd": {**FAMILIES["mixtral"], "num_local_experts": 3}}
    families = {"odd": "mixtral"}
    models = {
        name: tiny_model(folder / name, families.get(name, name), False, **sizes[name])
        for name in {name for name, *_ in LAYOUTS}
    }
    jobs = [Job(models[name], layout, spread(size)) for name, layout, size in [*LAYOUTS, SAVED, *RESUMED]]
    results = run_ranks(4, everything, jobs[:-3], jobs[-3], jobs[-2:], str(folder), timeout_s=400)
    return jobs, results[0], folder


def test_training_is_that_of_one_process(run: Any) -> None:
    jobs, outcome, _ = run
    wanted = {job.model: reference(job.model) for job in jobs}
    for job, curve in zip(jobs[:-3], outcome.curves, strict=True):
        loss, norm = worst(curve, wanted[job.model])
        assert loss < LOSS and norm < NORM, (Path(job.model).name, job.layout, loss, norm)


def test_any_layout_goes_on_from_a_checkpoint(run: Any) -> None:
    jobs, outcome, folder = run
    wanted = reference(jobs[-3].model)
    whole, *rest = outcome.resumed
    assert len(whole) == STEPS
    for curve, steps in ((whole, wanted), *((curve, wanted[SAVED_AT:]) for curve in rest)):
        loss, norm = worst(curve, steps)
        assert loss < LOSS and norm < NORM, (loss, norm)
    ended = [AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("saved", "resumed-2")]
    for name, tensor in ended[0].items():
        torch.testing.assert_close(ended[1][name], tensor, rtol=1e-3, atol=1e-5)
