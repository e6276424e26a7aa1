"""A model in memory is trained as it is, as one model on all ranks, and comes back trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness import Trainer
from tests.support.ranks import run_ranks
from tests.support.training import Curve, Job, arguments_of, by_torch, rows, steps_of, tiny_model, worst

pytestmark = pytest.mark.ranks


class OwnBlock(nn.Module):
    """In the place of a decoder's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(64, 20), nn.Linear(20, 64)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(self.down(hidden).sigmoid()) * self.scale


def freeze(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].requires_grad_(False)


def change(model: Any) -> None:
    freeze(model)
    torch.manual_seed(3)
    model.model.layers[0].mlp = OwnBlock()
    model.lm_head.weight = model.model.embed_tokens.weight.requires_grad_()
    model.model.rotary_emb.inv_freq.mul_(0.5)
    model.model.layers[1].self_attn.scaling = 0.7


CHANGES: dict[str, Callable[[Any], None]] = {"freeze": freeze, "change": change}


def in_memory(job: Job, seed: int) -> Any:
    """The model of a job, begun from `seed`, and changed by what the job's arguments name."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.model))
    for name in job.arguments:
        CHANGES[name](model)
    return model


def trainer_of(job: Job, folder: str, **arguments: Any) -> Trainer:
    settings = arguments_of(replace(job, arguments={}), f"{folder}/{job.layout}", **arguments)
    return Trainer(in_memory(job, dist.get_rank()), settings, train_dataset=rows())


def train_in_memory(jobs: list[Job], folder: str) -> list[tuple[Curve, dict[str, Tensor]]]:
    """Curve, and on rank 0 the trained weights that differ from what is in the exported files, by name."""
    found = []
    for job in jobs:
        trainer = trainer_of(job, folder)
        curve = steps_of(trainer)
        model = trainer.trained_model()
        assert (model is None) == (dist.get_rank() > 0)
        tensors = {} if model is None else {name: p.detach().clone() for name, p in model.state_dict().items()}
        found.append((curve, tensors))
        trainer.close()
    return found


def reference(job: Job) -> tuple[Curve, dict[str, Tensor]]:
    """The same by plain torch on rank 0's model."""
    model = in_memory(job, 0).train()
    ids = torch.tensor([row["input_ids"] for row in rows()])

    def loss_of_batch() -> Tensor:
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())

    return by_torch(model, loss_of_batch), model.state_dict()


FIRST = [("llama", "tp2z1", "freeze"), ("llama", "pp2z1", "change"), ("llama", "dp2z3", "change")]
"""Family, layout and what is changed; the first one is frozen in part."""
OTHERS = [("llama", "tp2z0", "freeze"), ("llama", "dp2z2", "change"), ("mixtral", "tp2z0", "")]


@pytest.mark.parametrize("cases", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_a_model_in_memory_is_one_model_and_stays_what_it_is(cases: list[tuple[str, str, str]], tmp_path: Path) -> None:
    models = {family: tiny_model(tmp_path / family, family, False) for family, *_ in cases}
    jobs = [Job(models[family], layout, arguments={what: True} if what else {}) for family, layout, what in cases]
    first, second = run_ranks(2, train_in_memory, jobs, str(tmp_path), timeout_s=240)
    for job, (curve, tensors), (other_curve, _) in zip(jobs, first, second, strict=True):
        wanted, weights = reference(job)
        loss, norm = worst(curve, wanted)
        assert loss < 2e-6 and norm < 2e-5 and curve == other_curve, (job, loss, norm)
        assert tensors.keys() == weights.keys()
        for name, tensor in weights.items():
            assert torch.allclose(tensors[name], tensor, atol=2e-5), (job, name)
    frozen = in_memory(jobs[0], 0).model.layers[1].mlp.up_proj.weight
    assert torch.equal(first[0][1]["model.layers.1.mlp.up_proj.weight"], frozen)
