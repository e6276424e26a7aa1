"""Muon and 8-bit AdamW give the numbers of one process in every layout, and clip by the norm of the gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import bitsandbytes
import pytest
import torch
from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainingArguments
from tests.support.ranks import DEVICE, run_ranks
from tests.support.training import Curve, Job, logged, rows, tiny_model, train_all, worst

pytestmark = pytest.mark.ranks

STEPS, CLIP = 4, 0.5
MUON = {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}}
EIGHT_BITS = {"type": "AdamW8bit", "params": {"lr": 0.01, "weight_decay": 0.1, "min_8bit_size": 1000}}
ARGUMENTS = {"max_steps": STEPS, "learning_rate": 0.01, "max_grad_norm": CLIP}
LOSS, NORM = 2e-6, 2e-6  # fp32 sums in another order
ROUNDED = 2e-6, 2e-5  # a state in the middle between two codes may get the other one
IN_FP16 = 2e-4, 1e-3  # a device orthogonalises in fp16, which a CPU lacks: it computes the reference in fp32


def one_process(model_dir: str, *, eight_bits: bool = False) -> Curve:
    """The same training by a plain loop over DeepSpeed's Muon for one device, or over bitsandbytes' AdamW."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    groups: dict[tuple[bool, bool], list[Any]] = {}
    for name, parameter in model.named_parameters():
        by_muon = parameter.ndim >= 2 and "embed" not in name and "lm_head" not in name
        groups.setdefault((by_muon, parameter.ndim >= 2), []).append(parameter)
    decayed = [
        (by_muon, {"params": parameters, "weight_decay": 0.1 if decays else 0.0})
        for (by_muon, decays), parameters in groups.items()
    ]
    optimizer: torch.optim.Optimizer
    if eight_bits:
        optimizer = bitsandbytes.optim.AdamW8bit([group for _, group in decayed], lr=0.01, min_8bit_size=1000)
    else:
        muon, other = {"use_muon": True, "lr": 0.01, "momentum": 0.9}, {"use_muon": False, "lr": 1e-3}
        optimizer = SingleDeviceMuonWithAuxAdam([group | (muon if by_muon else other) for by_muon, group in decayed])
    ids = torch.tensor([row["input_ids"] for row in rows()])
    curve = []
    for _ in range(STEPS):
        logits = model(ids).logits
        loss = cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


def job(model: str, layout: str, optimizer: dict[str, Any] = MUON, **zero: Any) -> Job:
    config = {"optimizer": optimizer}
    if zero:
        config["zero_optimization"] = {"stage": int(layout[-1]), **zero}
    return Job(model, layout, config, ARGUMENTS)


def resumed(jobs: list[Job], output_dir: str) -> list[Curve]:
    """Train each job in two runs, the second of which goes on from the checkpoint of the first; losses and norms."""
    curves = []
    for task in jobs:
        for until, asked in ((STEPS // 2, None), (STEPS, "auto")):
            arguments = TrainingArguments(
                deepspeed_config=task.deepspeed_config(),
                output_dir=f"{output_dir}/{task.layout}",
                lr_scheduler_type="constant",
                resume_from_checkpoint=asked,
                save_steps=STEPS // 2,
                **{**ARGUMENTS, "max_steps": until},
            )
            trainer = Trainer(task.model, arguments, train_dataset=rows())
            trainer.train()
            trainer.close()
        rows_of_run = logged(arguments.output_dir)
        curves.append([(row["loss"], row["grad_norm"]) for row in rows_of_run if "loss" in row])
    return curves


def all_curves(jobs: list[Job], to_resume: list[Job], output_dir: str) -> list[Curve]:
    """What each rank does."""
    with torch.compiler.set_stance("force_eager"):  # on a device as on a CPU
        return train_all(jobs, output_dir) + resumed(to_resume, f"{output_dir}/resumed")


class Layouts(NamedTuple):
    """Layouts of the optimizers, and those in which they are resumed."""

    muon: tuple[str, ...]
    tied: tuple[str, ...]
    eight_bits: tuple[str, ...]
    resumed: tuple[str, ...]
    eight_bits_resumed: tuple[str, ...]


FIRST = Layouts(("tp2z0",), (), (), ("dp2z1",), ("tp2z1",))
OTHERS = Layouts(
    ("dp2z0", "dp2z2", "pp2z0", "pp2z1", "tp2z2", "tp2z3"),
    ("pp2z0", "pp2z1"),
    ("pp2z0", "tp2z3", "dp2z1", "dp2z3"),
    ("dp2z3",),
    ("dp2z2",),
)


@pytest.mark.thorough
@pytest.mark.parametrize("layouts", [FIRST, OTHERS], ids=["first", "others"])
def test_an_optimizer_is_the_same_in_every_layout_and_goes_on_from_a_checkpoint(
    layouts: Layouts, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "model", "llama", False)
    wanted = one_process(model)
    assert wanted[0][1] > 2 * CLIP  # so that clipping by another norm shows in the losses
    jobs = [job(model, layout) for layout in layouts.muon]
    if layouts is FIRST:
        jobs.append(job(model, "dp2z3", sub_group_size=20_000))
    else:
        jobs.append(job(model, "dp2z2", offload_optimizer={"device": "cpu"}))
    to_resume = [job(model, layout) for layout in layouts.resumed]
    # by its name its embedding goes to Muon, its tied head would go to AdamW
    gpt2 = tiny_model(tmp_path / "gpt2", "gpt2", True)
    jobs += [job(gpt2, layout) for layout in layouts.tied]
    references = {(model, "Muon"): wanted, (gpt2, "Muon"): one_process(gpt2)}
    if DEVICE[0] == "cpu":  # bitsandbytes knows no other device that tests have
        # tensor parallelism and ZeRO cut blocks of 8-bit states
        references[model, "AdamW8bit"] = one_process(model, eight_bits=True)
        jobs += [job(model, layout, EIGHT_BITS) for layout in layouts.eight_bits]
        to_resume += [job(model, layout, EIGHT_BITS) for layout in layouts.eight_bits_resumed]
    curves = run_ranks(2, all_curves, jobs, to_resume, str(tmp_path), timeout_s=400)[0]
    off = {
        f"{index} {task.layout}": worst(curve, references[task.model, task.config["optimizer"]["type"]])
        for index, (task, curve) in enumerate(zip(jobs + to_resume, curves, strict=True))
    }
    exact = (LOSS, NORM) if DEVICE[0] == "cpu" else IN_FP16
    within = [ROUNDED if task.config["optimizer"] is EIGHT_BITS else exact for task in jobs + to_resume]
    found = zip(off.items(), within, strict=True)
    assert {name: pair for (name, pair), (loss, norm) in found if pair[0] > loss or pair[1] > norm} == {}
