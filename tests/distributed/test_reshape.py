"""A checkpoint has no layout: any layout, ZeRO stage and number of ranks goes on from it with the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainingArguments
from harness.cli import main
from tests.support.ranks import run_ranks
from tests.support.training import Job, logged, rows, tiny_model

pytestmark = pytest.mark.ranks

Layouts = dict[int, list[str]]
"""Names of layouts by their number of ranks."""
FIRST: Layouts = {1: ["z0"], 2: ["pp2z1", "tp2z0", "dp2z3"]}
ALL: Layouts = {1: ["z0"], 2: ["pp2z1", "tp2z0", "dp2z2", "dp2z3"], 4: ["pp2tp2z1", "dp2tp2z3"]}
SAVED_AT, STEPS = 2, 4
DROPOUT = {"attention_dropout": 0.1}


def train(job: Job, place: Path, resume: Path | None) -> list[float]:
    """Return the losses of a run's steps; a run that does not resume leaves a checkpoint in the middle."""
    arguments = TrainingArguments(
        deepspeed_config=job.deepspeed_config(),
        output_dir=str(place),
        max_steps=STEPS,
        save_steps=0 if resume else SAVED_AT,
        resume_from_checkpoint=None if resume is None else str(resume),
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        attn_implementation="eager",  # a device's fused kernels draw masks by themselves
    )
    data = rows(masked=True) + rows(masked=True)[:5]  # 13 samples: a batch reaches into the next epoch
    trainer = Trainer(job.model, arguments, data)
    trainer.train()
    trainer.close()
    return [row["loss"] for row in logged(place)]


def begin_all(jobs: list[Job], folder: str) -> list[list[float]]:
    return [train(job, Path(folder, job.layout), None) for job in jobs]


def resume_all(pairs: list[tuple[Job, str]], folder: str) -> list[list[float]]:
    """Go on in each job's layout from the checkpoint of the layout that is named beside it."""
    checkpoints = [Path(folder, saved, f"checkpoint-{SAVED_AT}") for _, saved in pairs]
    places = [Path(folder, f"{job.layout}-after-{saved}") for job, saved in pairs]
    return [train(job, place, path) for (job, _), place, path in zip(pairs, places, checkpoints, strict=True)]


@pytest.mark.parametrize(
    ("layouts", "by"),
    [(FIRST, 2), *(pytest.param(ALL, by, marks=pytest.mark.thorough) for by in (3, 0))],
    ids=["another", "all from another", "all from its own"],
)
def test_every_layout_goes_on_from_every_kind_of_layout(layouts: Layouts, by: int, tmp_path: Path) -> None:
    """`by`: how far the layout that goes on is in the list from the one that was saved; 0: in the same layout."""
    every = [name for names in layouts.values() for name in names]
    model = tiny_model(tmp_path / "m", "llama", True, **DROPOUT)
    unbroken: dict[str, list[float]] = {}
    for size, names in layouts.items():
        curves = run_ranks(size, begin_all, [Job(model, name) for name in names], str(tmp_path))[0]
        unbroken |= dict(zip(names, curves, strict=True))
    for size, names in layouts.items():
        pairs = [(Job(model, name), every[(every.index(name) + by) % len(every)]) for name in names]
        for (job, saved), losses in zip(pairs, run_ranks(size, resume_all, pairs, str(tmp_path))[0], strict=True):
            if saved == job.layout:
                assert losses == unbroken[saved][SAVED_AT:], f"{saved} is not continued to the bit"
            assert losses == pytest.approx(unbroken["z0"][SAVED_AT:], rel=1e-5), f"{job.layout} after {saved}"
    require_one_content(tmp_path, every)


def require_one_content(folder: Path, layouts: list[str]) -> None:
    """All layouts have written the same tensors under the same names, and HuggingFace reads them."""
    files = ("model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors")
    wanted, *others = (
        {file: load_file(folder / name / f"checkpoint-{SAVED_AT}" / file) for file in files} for name in layouts
    )
    for found in others:
        for file in files:
            assert found[file].keys() == wanted[file].keys()
            for name, tensor in found[file].items():
                torch.testing.assert_close(tensor, wanted[file][name], rtol=1e-3, atol=1e-5)
    checkpoint = folder / layouts[-1] / f"checkpoint-{SAVED_AT}"
    read: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, tensor in read.state_dict().items():
        if name in wanted["model.safetensors"]:
            torch.testing.assert_close(tensor, others[-1]["model.safetensors"][name], rtol=0, atol=0)
    words = ["checkpoint", "export", str(checkpoint), "--output_dir", str(folder / "x"), "--dtype", "bfloat16"]
    assert main(words) == 0
    exported = AutoModelForCausalLM.from_pretrained(folder / "x")
    assert exported.dtype == torch.bfloat16
    assert torch.equal(exported.lm_head.weight, read.lm_head.weight.bfloat16())
