"""Samples of text at evaluations are those of transformers' greedy generation, after training on an IterableDataset."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM

from harness import Trainer
from harness.data.tokenizer import ByteTokenizer
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Job, arguments_of, rows, tiny_model

pytestmark = pytest.mark.ranks

PROMPTS = ["Sphinx of black", "0123"]


class Texts(IterableDataset):  # type: ignore[type-arg]  # torch's has no subscript at run time
    """Texts without end."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from ({"text": f"{number} times {number} is {number * number}. "} for number in itertools.count())


def trained(jobs: list[Job], folder: str, prompts: str) -> None:
    for job in jobs:
        settings = arguments_of(
            job, f"{folder}/{job.layout}", max_steps=2, eval_steps=2, sample_prompts=prompts, sample_tokens=6,
            block_size=32, shuffle_buffer_size=12,
        )  # fmt: skip
        trainer = Trainer(job.model, settings, Texts(), rows()[:2], processing_class=ByteTokenizer())
        trainer.train()
        trainer.save_model()
        trainer.close()


def test_samples_are_those_of_transformers_in_every_layout(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", False, vocab_size=301, num_hidden_layers=4)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    schedules = {"pp2tp2z1": "1f1b", "tp2dp2z3": None, "pp2dp2z1": "zero-bubble-v", "pp2tp2z0": "dualpipe-v"}
    jobs = [
        Job(model, layout, {"pipeline": {"stages": 2, "schedule": schedule}} if schedule else {})
        for layout, schedule in schedules.items()
    ]
    run_ranks(4, trained, jobs, str(tmp_path), str(prompts))
    layouts = list(schedules)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / layouts[0])
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([ByteTokenizer().encode(prompt)])
        made = exported.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=257, eos_token_id=256)
        expected.append(ByteTokenizer().decode(made[0, ids.shape[1] :].tolist()))
    for layout in layouts:
        found = [json.loads(line) for line in (tmp_path / layout / "samples.jsonl").read_text().splitlines()]
        assert found == [{"step": 2, "prompt": p, "text": t} for p, t in zip(PROMPTS, expected, strict=True)]
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / layout / "metrics.jsonl").read_text().splitlines()]
        for layout in layouts
    ]
    assert all(one == pytest.approx(losses[0], abs=1e-5) and len(one) == 2 for one in losses)
