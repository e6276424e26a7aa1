"""Parameters that no sample uses are not decayed, as in torch: in every layout, and from their first use on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness import Trainer
from harness.batches.order import sample_order
from tests.support.models import model_of
from tests.support.ranks import run_ranks
from tests.support.training import STEPS, Job, arguments_of, rows

pytestmark = pytest.mark.ranks

DECAY = {"weight_decay": 0.5, "learning_rate": 1e-2}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FIRST = [Job("", name, arguments=DECAY) for name in ("pp2z1", "tp2z0", "dp2z2", "dp2z3")]
FIRST += [Job("", "dp2z1", BF16, DECAY)]
OTHERS = [Job("", name, arguments=DECAY) for name in ("pp2z0", "dp2z0", "dp2z1")]
OTHERS += [Job("", name, BF16, DECAY) for name in ("pp2z0", "dp2z3")]
OTHERS += [Job("", "pp2z0", {"pipeline": {"stages": 2, "schedule": "zero-bubble"}}, DECAY)]
OTHERS += [Job("", "dp2z2", {"gradient_reduction": {"once_per_step": True}}, DECAY)]


class Sometimes(nn.Module):
    """Uses one weight from the third sample of a step on, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.late, self.never = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.late(x) if bool((x > 2).any()) else y


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def of_layouts(jobs: list[Job], model: str, folder: str) -> list[dict[str, Tensor]]:
    found = []
    for number, job in enumerate(jobs):
        with_model = Job(model, job.layout, job.config, job.arguments)
        trainer = Trainer(model, arguments_of(with_model, f"{folder}/{number}"), train_dataset=rows())
        for _ in range(STEPS):
            trainer.training_step()
        found.append(weights_of(trainer.save_model()))
        trainer.close()
    return found


def of_own_layers(folder: str) -> list[dict[str, Tensor]]:
    """Weights before and after a step that uses some of them, and after one that uses another on one rank or both."""
    order = sample_order(8, 42, 0).tolist()
    found = []
    for stage in range(4):
        # of the second step; ZeRO-2 and ZeRO-3 need ranks that use the same weights
        larger = order[7:] if stage < 2 else order[4:]
        points = [(torch.full((4,), 3.0 if index in larger else 1.0), torch.zeros(4)) for index in range(8)]
        batch = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 4, "gradient_accumulation_steps": 2}
        job = Job("", f"dp2z{stage}", batch, DECAY)
        torch.manual_seed(0)
        layers = [Sometimes(), nn.Linear(4, 4)]
        arguments = arguments_of(job, f"{folder}/own-{stage}", verify_plan="auto")  # there is no plan
        trainer = Trainer(layers, arguments, train_dataset=points, loss_fn=nn.functional.mse_loss)
        for steps in range(3):
            if steps:
                trainer.training_step()
            found.append(weights_of(trainer.save_model(f"{folder}/own-{stage}-{steps}")))
        trainer.close()
    return found


def by_torch(model: PreTrainedModel) -> set[str]:
    """Train as the ranks do; return the names of the parameters that have no gradient."""
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if (name in decayed) is so], "weight_decay": 0.5 * so}
        for so in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=DECAY["learning_rate"], betas=(0.9, 0.95))
    ids = torch.tensor([row["input_ids"] for row in rows()])
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name for name, parameter in named.items() if parameter.grad is None}


@pytest.mark.parametrize("jobs", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_what_is_unused_is_not_decayed(jobs: list[Job], tmp_path: Path) -> None:
    model = model_of("bart", d_model=32, decoder_layers=2, decoder_ffn_dim=32, decoder_attention_heads=2, dropout=0.0)
    model.save_pretrained(tmp_path / "model")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    unused = by_torch(model.train())
    after = {name: p.detach() for name, p in model.named_parameters()}
    assert sum("encoder_attn" in name for name in unused) == len(unused) > 8
    of_model = run_ranks(2, of_layouts, jobs, str(tmp_path / "model"), str(tmp_path), timeout_s=300)[0]
    for job, found in zip(jobs, of_model, strict=True):
        for name in unused & found.keys():
            expected = before[name].bfloat16().float() if "bf16" in job.config else before[name]
            assert torch.equal(found[name], expected), (job.layout, job.config, name)
        if "bf16" not in job.config:
            names = found.keys() & after.keys()
            moved = torch.stack([(after[name] - before[name]).norm() for name in names]).norm()
            apart = torch.stack([(found[name] - after[name]).norm() for name in names]).norm()
            assert apart < 1e-3 * moved, (job.layout, apart, moved)


def test_what_a_later_sample_uses_is_decayed_from_then_on(tmp_path: Path) -> None:
    of_own = run_ranks(2, of_own_layers, str(tmp_path))[0]
    for first, second, third in zip(of_own[::3], of_own[1::3], of_own[2::3], strict=True):
        assert torch.equal(first["0.never.weight"], third["0.never.weight"])
        assert torch.equal(first["0.late.weight"], second["0.late.weight"])
        for name in ("0.always.weight", "1.weight"):
            assert not torch.equal(first[name], second[name])
        assert not torch.equal(second["0.late.weight"], third["0.late.weight"])
    for stage in (0, 2):  # what both ranks are to agree on
        pair = of_own[3 * stage + 2], of_own[3 * stage + 5]
        assert all(torch.allclose(pair[0][name], pair[1][name], atol=1e-6) for name in pair[0])
