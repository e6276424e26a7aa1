"""A checkpoint that is read and written without training is the same in every layout, file by file and byte by byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainingArguments
from tests.support.ranks import run_ranks
from tests.support.training import Job, tiny_model

pytestmark = pytest.mark.ranks

FIRST, OTHERS = ["tp2dp2z3"], ["pp2tp2z1", "dp4z3"]


def read_and_write(model: str, layouts: list[str], folder: str) -> None:
    for layout in layouts:
        job = Job(model, layout, config={"bf16": {"enabled": True}})
        arguments = TrainingArguments(
            deepspeed_config=job.deepspeed_config(), output_dir=f"{folder}/{layout}", max_steps=1, save_steps=0
        )
        trainer = Trainer(model, arguments)
        trainer.save_model()
        trainer.close()


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("layouts", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"])
def test_a_mixture_of_experts_comes_out_as_it_went_in(layouts: list[str], tmp_path: Path) -> None:
    tiny_model(tmp_path / "source", "mixtral", tied=False, num_local_experts=4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source", max_shard_size="100KB")
    (tmp_path / "source/model.safetensors").unlink()
    wanted = contents(tmp_path / "source")
    assert len(wanted) > 2
    run_ranks(4, read_and_write, str(tmp_path / "source"), layouts, str(tmp_path))
    ids = torch.arange(24).view(2, 12)
    for layout in layouts:
        assert contents(tmp_path / layout) == wanted, layout
        again = AutoModelForCausalLM.from_pretrained(tmp_path / layout)
        assert torch.equal(again(ids).logits, model(ids).logits)
