"""ZeRO-3 with a second copy of the parameters in each group of neighbours (hpZ) gives the numbers of ZeRO-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainingArguments
from tests.support.ranks import run_ranks
from tests.support.training import Curve, Job, logged, rows, tiny_model, trained, worst

pytestmark = pytest.mark.ranks

STEPS = 4


def train(task: Job, output_dir: str) -> tuple[Curve, set[int]]:
    """Train and export; with a second copy the second half comes after a resume.

    Returns the curve, and of how many ranks it takes the second copies to make a whole parameter (0: there is none).
    """
    shares: set[int] = set()
    halves = [(STEPS // 2, None)] if "zero_optimization" in task.config else []
    for until, asked in (*halves, (STEPS, "auto")):
        arguments = TrainingArguments(
            deepspeed_config=task.deepspeed_config(),
            output_dir=output_dir,
            max_steps=until,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            save_steps=STEPS // 2,
            resume_from_checkpoint=asked,
        )
        trainer = Trainer(task.model, arguments, train_dataset=rows())
        module = trainer.engine.deepspeed.module
        module.register_forward_hook(lambda module, *_: shares.update(map(share, module.parameters())))
        trainer.train()
        if until == STEPS:
            trainer.save_model()
        trainer.close()
    return [(row["loss"], row["grad_norm"]) for row in logged(output_dir) if "loss" in row], shares


def share(parameter: Any) -> int:
    copy = parameter.ds_secondary_tensor
    return 0 if copy is None else round(parameter.ds_numel / copy.ds_numel)


def train_each(jobs: list[Job], output_dir: str) -> list[tuple[Curve, set[int]]]:
    """What each rank does; the last job has no second copy, and must not find that of the others."""
    return [train(task, f"{output_dir}/{index}") for index, task in enumerate(jobs)]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["dp4z3", "tp2dp2z3"])
def test_a_second_copy_changes_no_number(layout: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama", True)
    wanted, final = trained(model, STEPS)
    zero = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    jobs = [Job(model, layout, {"zero_optimization": zero}), Job(model, "dp4z3")]
    results = run_ranks(4, train_each, jobs, str(tmp_path), timeout_s=400)[0]
    for index, (task, (curve, shares)) in enumerate(zip(jobs, results, strict=True)):
        assert max(worst(curve, wanted)) < 2e-6, (task.layout, curve)
        assert max(shares) == (2 if "zero_optimization" in task.config else 0), task.layout
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / str(index), dtype=torch.float32)
        for name, tensor in final.state_dict().items():
            assert torch.allclose(exported.state_dict()[name], tensor, atol=2e-5), (task.layout, name)


@pytest.mark.thorough
def test_one_data_parallel_rank_needs_no_second_copy(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama", True)
    task = Job(model, "z3", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})
    [[(curve, shares)]] = run_ranks(1, train_each, [task], str(tmp_path))
    assert max(worst(curve, trained(model, STEPS)[0])) < 2e-6, curve
    assert shares == {0}
