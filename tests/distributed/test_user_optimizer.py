"""An optimizer and scheduler of the user's give the numbers of plain torch, in every layout and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from harness import Trainer
from tests.support.ranks import run_ranks
from tests.support.training import Curve, Job, arguments_of, rows, tiny_model, worst

pytestmark = pytest.mark.ranks

STEPS, SAVED_AT = 5, 2

Pair = tuple[optim.Optimizer, LRScheduler]


def model_of(job: Job) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).train()
    if job.masked:
        torch.manual_seed(0)  # for the adapters
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], bias="none"))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name or "norm" in name)
    return model


def pair_of(model: nn.Module, layout: str) -> Pair:
    """Three groups, of which the first one is on the last of two stages only."""
    groups: dict[str, list[nn.Parameter]] = {"lm_head": [], "norm": [], "": []}
    for name, parameter in model.named_parameters():
        groups[next(word for word in groups if word in name)].append(parameter)
    rates = {"lm_head": {"lr": 3e-3, "weight_decay": 0.1}, "norm": {"lr": 2e-3, "weight_decay": 0.0}, "": {}}
    listed = [{"params": groups[word], **options} for word, options in rates.items()]
    if layout.endswith("z3"):
        sgd = optim.SGD(listed, lr=0.1, momentum=0.9, nesterov=True)
        return sgd, OneCycleLR(sgd, max_lr=[0.1, 0.3, 0.2], total_steps=STEPS)  # cycles momentum, too
    adamw = optim.AdamW(listed, lr=1e-3, betas=(0.9, 0.95))
    return adamw, get_cosine_schedule_with_warmup(adamw, 2, STEPS)


def by_torch(job: Job) -> tuple[Curve, list[float], dict[str, Tensor]]:
    model = model_of(job)
    optimizer, scheduler = pair_of(model, job.layout)
    ids = torch.tensor([row["input_ids"] for row in rows()])
    curve, rates = [], []
    for _ in range(STEPS):
        logits = model(ids).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        curve.append((loss.item(), norm.item()))
    return curve, rates, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained(jobs: list[Job], folder: str) -> list[Any]:
    """Curve, rates, weights; and curve and weights of a run that was resumed half-way."""

    def steps(trainer: Trainer, until: int) -> tuple[Curve, list[float]]:
        records = [trainer.training_step() for _ in range(trainer.state.global_step, until)]
        return [(each.loss, each.grad_norm or 0.0) for each in records], [each.learning_rate for each in records]

    def weights(trainer: Trainer, job: Job) -> dict[str, Tensor]:
        if not job.masked:
            model = trainer.trained_model()
            return {} if model is None else {name: p.clone() for name, p in model.named_parameters()}
        return {}

    found = []
    for job in jobs:
        arguments = arguments_of(job, f"{folder}/{job.layout}", max_steps=STEPS)
        model = model_of(job)
        trainer = Trainer(model, arguments, train_dataset=rows(), optimizers=pair_of(model, job.layout))
        first = steps(trainer, SAVED_AT)
        saved = trainer.save_checkpoint()
        last = steps(trainer, STEPS)
        whole = first[0] + last[0], first[1] + last[1], weights(trainer, job)
        trainer.close()
        arguments = arguments_of(job, f"{folder}/{job.layout}", max_steps=STEPS, resume_from_checkpoint=str(saved))
        model = model_of(job)
        trainer = Trainer(model, arguments, train_dataset=rows(), optimizers=pair_of(model, job.layout))
        again = steps(trainer, STEPS)
        found.append((whole, (first[0] + again[0], first[1] + again[1], weights(trainer, job))))
        trainer.close()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("layouts", [("pp2z1", "dp2z3"), ("dp2z1", "tp2z0")], ids=["first", "others"])
def test_an_optimizer_and_a_scheduler_of_the_users_are_those_of_plain_torch(
    layouts: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "m", "llama", False)
    # with tensor parallelism: adapters, and norms that the user unfroze
    jobs = [Job(model, layout, masked=layout.startswith("tp")) for layout in layouts]
    for job, runs in zip(jobs, run_ranks(2, trained, jobs, str(tmp_path), timeout_s=240)[0], strict=True):
        wanted, rates, expected = by_torch(job)
        for curve, found_rates, weights in runs:
            loss, norm = worst(curve, wanted)
            assert loss < 2e-6 and norm < 2e-5, (job.layout, loss, norm)
            assert found_rates == rates
            assert all((weights[name] - expected[name]).abs().max() < 1e-5 for name in weights), job.layout
            assert job.masked or weights.keys() == expected.keys()
