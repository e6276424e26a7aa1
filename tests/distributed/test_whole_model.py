"""The whole vision-language model comes out of training its text decoder on several ranks, launched once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from harness import Trainer
from tests.support.ranks import run_ranks
from tests.support.training import Job, arguments_of
from tests.unit.extras.test_whole_model import TOWERS, logits, saved, tensors_in

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]

ROWS = [{"input_ids": [(7 * row + at) % 250 + 3 for at in range(24)]} for row in range(8)]
IDS = torch.tensor([ROWS[0]["input_ids"]])
SPREAD: dict[str, Any] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def train(jobs: list[Job], folder: str) -> list[tuple[str, Tensor | None]]:
    """The directory that each job has written, and on rank 0 the text logits of the trained decoder."""
    found = []
    for index, job in enumerate(jobs):
        trainer = Trainer(job.model, arguments_of(job, f"{folder}/{index}", learning_rate=1e-2), ROWS)
        trainer.train()
        text = trainer.trained_model()
        found.append((str(trainer.save_model()), None if text is None else logits(text, IDS)))
        trainer.close()
    return found


def test_the_whole_model_comes_out_of_several_ranks(tmp_path: Path) -> None:
    gemma3, qwen = (saved(tmp_path / family, family, torch.float32) for family in ("gemma3", "qwen3_vl_moe"))
    jobs = [Job(str(gemma3), "pp2z1"), Job(str(gemma3), "dp2z3", SPREAD), Job(str(qwen), "tp2z1")]
    written = run_ranks(2, train, jobs, str(tmp_path / "out"), timeout_s=400)[0]
    for job, (out, expected) in zip(jobs, written, strict=True):
        before, after = tensors_in(Path(job.model)), tensors_in(Path(out))
        assert before.keys() == after.keys()
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert len(changed) > 10 and not [name for name in changed if name.startswith(TOWERS)]
        assert torch.allclose(logits(AutoModelForImageTextToText.from_pretrained(out), IDS), expected, atol=1e-5)
