"""Preferences in every layout, against the formulas in float64: steps, evaluations, adapters, resuming."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import IterableDataset

from harness import PreferenceArguments, Preferences, Trainer
from harness.data.tokenizer import ByteTokenizer
from tests.support.models import model_of
from tests.support.preferences import FLAGS, LABELLED, PAIRS, Step, evaluated, trained
from tests.support.ranks import run_ranks
from tests.support.training import STEPS, Job, arguments_of

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]

BATCH = 4


@dataclass(frozen=True)
class PreferenceJob(Job):
    """A job that trains on preferences; `of`: its loss' settings. After its first step it may go on in the layout
    `then`."""

    kind: str = "dpo"
    of: dict[str, float] = field(default_factory=dict)
    adapters: bool = False
    then: str = ""
    micro: int = 1
    streamed: bool = False

    @property
    def name(self) -> str:
        words = ("adapters" * self.adapters, "streamed" * self.streamed, self.then, *self.config)
        return "-".join(filter(None, (self.kind, self.layout, *words)))

    def deepspeed_config(self) -> dict[str, Any]:
        batch_ranks = self.size("dp")
        batch = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": BATCH // self.micro // batch_ranks,
            "context_parallel": {"size": self.size("cp")},
        }
        return {**super().deepspeed_config(), **batch, **self.config}


class Stream(IterableDataset[dict[str, object]]):
    """The pairs, one after the other and again."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        return cycle(dict(row) for row in PAIRS)


def model(adapters: bool) -> Any:
    """A tiny model, with adapters that change its output if asked."""
    base = model_of("llama", num_hidden_layers=2)
    if not adapters:
        return base
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return adapted


def train_all(jobs: list[PreferenceJob], output_dir: str) -> list[list[Step]]:
    """Several jobs one after the other in the same processes: the numbers of each step, and of an evaluation."""
    with patch("datasets.config.HF_DATASETS_CACHE", Path(output_dir) / "cache"):
        return [_train(job, f"{output_dir}/{index}") for index, job in enumerate(jobs)]


def _train(job: PreferenceJob, output_dir: str) -> list[Step]:
    trainer = _trainer(job, output_dir)
    found = []
    for step in range(STEPS):
        if job.then and step == 1:
            trainer.save_checkpoint()
            trainer.close()
            trainer = _trainer(replace(job, layout=job.then), output_dir, resume_from_checkpoint="auto")
        record = trainer.training_step()
        found.append({"loss": record.loss, "grad_norm": record.grad_norm or 0.0, **record.metrics})
    found.append(trainer.evaluate())
    trainer.close()
    return found


def _trainer(job: PreferenceJob, output_dir: str, **more: Any) -> Trainer:
    rows = LABELLED if job.kind == "kto" else PAIRS
    train = Stream() if job.streamed else rows
    flags = {FLAGS[name]: value for name, value in job.of.items()}
    return Trainer(
        model(job.adapters),
        arguments_of(job, output_dir, per_device_eval_batch_size=3, **more),
        train,
        rows,
        processing_class=ByteTokenizer(),
        objective=Preferences(PreferenceArguments(preference=job.kind, **flags)),
    )


FIRST = [
    PreferenceJob("", "dp2z3", adapters=True, then="pp2z1"),
    PreferenceJob("", "dp2z1", kind="kto", of={"beta": 0.5, "undesirable": 0.5}, micro=2),
]
OTHERS = [
    PreferenceJob("", "tp2z0", kind="orpo", config={"tiling": {"loss": 7}}),
    PreferenceJob("", "cp2z0", kind="ipo", of={"beta": 0.5}),
    PreferenceJob("", "dp2z3", kind="simpo", of={"beta": 2.0}, micro=2),
    PreferenceJob("", "dp2z1", of={"beta": 0.5, "smoothing": 0.2}, then="pp2z0"),
    PreferenceJob("", "pp2z0", kind="orpo", of={"beta": 0.3}, then="tp2z1"),
    PreferenceJob("", "dp2z1", kind="simpo", of={"beta": 2.0}, streamed=True, then="pp2z0"),
    PreferenceJob("", "tp2z0"),
    PreferenceJob("", "cp2z1", kind="orpo"),
    PreferenceJob("", "dp2z2", kind="orpo"),
    PreferenceJob("", "pp2z0", kind="kto", of={"beta": 0.5}, micro=2),
    PreferenceJob("", "tp2z0", adapters=True),
]
ON_FOUR = [
    PreferenceJob("", "pp2tp2z0"),
    PreferenceJob("", "pp2dp2z1", kind="kto", of={"beta": 0.5}, micro=2),
    PreferenceJob("", "tp2cp2z1", kind="dpo", config={"tiling": {"loss": 5}}),
]


@pytest.mark.parametrize(
    ("ranks", "jobs"),
    [
        pytest.param(2, FIRST, id="two ranks"),
        pytest.param(2, OTHERS, id="other layouts"),
        pytest.param(4, ON_FOUR, id="four ranks"),
    ],
)
def test_every_layout_trains_as_the_formulas(ranks: int, jobs: list[PreferenceJob], tmp_path: Path) -> None:
    of_ranks = run_ranks(ranks, train_all, jobs, str(tmp_path), timeout_s=400)
    for job, *of_job in zip(jobs, *of_ranks, strict=True):
        wanted = by_formulas(job)
        for steps in of_job:
            for row, expected in zip(steps, wanted, strict=job.kind != "kto"):
                assert {name: row[name] for name in expected} == pytest.approx(expected, rel=3e-4, abs=3e-5), job.name
            losses = [row["loss"] for row in steps[:STEPS]]
            assert losses == pytest.approx([each["loss"] for each in wanted[:STEPS]], rel=3e-6), job.name


def by_formulas(job: PreferenceJob) -> list[Step]:
    """What the steps of a job, and its evaluation unless it is of kto, come to."""
    whole = model(job.adapters)
    before = copy.deepcopy(whole)
    if job.adapters:
        before = before.unload()
    how: dict[str, Any] = {"micro": BATCH // job.micro // job.size("dp"), "group": job.micro, "in_order": job.streamed}
    wanted = trained(whole, job.kind, steps=STEPS, batch=BATCH, before=before, **how, **job.of)
    if job.kind != "kto":
        wanted.append({f"eval_{name}": value for name, value in evaluated(whole, before, job.kind, **job.of).items()})
    return wanted
