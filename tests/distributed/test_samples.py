"""Samples of text at evaluations are those of transformers' greedy generation, after training on an IterableDataset;
the losses of the sources of a mixture are those of transformers, too."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM

from harness import Trainer
from harness.batches.collate import IGNORED
from harness.data.blocks import make_blocks
from harness.data.files.documents import as_documents
from harness.data.mixing import Mixture
from harness.data.on_disk.cache import Preparation
from harness.data.samples import make_samples
from harness.data.tokenizer import ByteTokenizer
from harness.training.callbacks import StepRecord
from tests.support.ranks import run_ranks
from tests.support.training import BATCH, Job, arguments_of, logged, rows, tiny_model

pytestmark = pytest.mark.ranks

PROMPTS = ["Sphinx of black", "0123"]


class Texts(IterableDataset):  # type: ignore[type-arg]  # torch's has no subscript at run time
    """Texts without end."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from ({"text": f"{number} times {number} is {number * number}. "} for number in itertools.count())


def mixture(folder: str) -> Mixture:
    """Text, of which each token is learnt, and conversations, of which a few are."""
    texts = as_documents([{"text": "Sphinx of black quartz, judge my vow. " * 40}], "text")
    turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n * n)}] for n in range(9)]
    chats = as_documents([{"messages": each} for each in turns], "chats")
    form: Any = {"tokenizer": ByteTokenizer(), "block_size": 48, "how": Preparation(folder)}
    return Mixture([make_blocks(texts, **form), make_samples(chats, **form)], [1, 1], ["a/text.txt", "chat.jsonl"])


def trained(jobs: list[Job], folder: str, prompts: str) -> list[list[StepRecord]]:
    records = []
    for job in jobs:
        settings = arguments_of(
            job, f"{folder}/{job.layout}", max_steps=2, eval_steps=2, sample_prompts=prompts, sample_tokens=6,
            block_size=32, shuffle_buffer_size=12,
        )  # fmt: skip
        trainer = Trainer(job.model, settings, Texts(), rows()[:2], processing_class=ByteTokenizer())
        trainer.train()
        trainer.save_model()
        trainer.close()
        mixed = Trainer(job.model, arguments_of(job, f"{folder}/{job.layout}-mixed", max_steps=2), mixture(folder))
        records.append([mixed.training_step() for _ in range(2)])
        mixed.close()
    return records


def by_source(model: str, folder: str) -> dict[str, float]:
    """The mean loss of the labels of each source in the first step, by transformers."""
    plain, data = AutoModelForCausalLM.from_pretrained(model), mixture(folder)
    losses: dict[str, list[torch.Tensor]] = {"text": [], "chat": []}
    for row in data.order(0, BATCH, 42).tolist():
        ids, labels = data[row]["input_ids"][None], data[row]["labels"]
        found = torch.nn.functional.cross_entropy(plain(ids).logits[0, :-1], labels[1:], reduction="none")
        losses["text" if row < len(data.sources[0]) else "chat"].append(found[labels[1:] != IGNORED])
    return {name: torch.cat(found).mean().item() for name, found in losses.items()}


FIRST: dict[str, str | None] = {"pp2z1": "1f1b"}
"""Schedules by layout."""
OTHERS: dict[str, str | None] = {"dp2z3": None, "tp2z3": None, "pp2z0": "dualpipe-v"}


@pytest.mark.parametrize(
    "schedules", [FIRST, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["first", "others"]
)
def test_samples_are_those_of_transformers_in_every_layout(schedules: dict[str, str | None], tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", False, vocab_size=301, num_hidden_layers=4)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    jobs = [
        Job(model, layout, {"pipeline": {"stages": 2, "schedule": schedule}} if schedule else {})
        for layout, schedule in schedules.items()
    ]
    records = run_ranks(2, trained, jobs, str(tmp_path), str(prompts))[0]
    wanted = by_source(model, str(tmp_path))
    for first, second in records:
        assert first.source_losses == pytest.approx(wanted, rel=2e-6)
        assert second.source_losses == pytest.approx(records[0][1].source_losses, rel=2e-6)
    layouts = list(schedules)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / layouts[0])
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([ByteTokenizer().encode(prompt)])
        made = exported.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=257, eos_token_id=256)
        expected.append(ByteTokenizer().decode(made[0, ids.shape[1] :].tolist()))
    for layout in layouts:
        found = logged(tmp_path / layout, "samples")
        assert found == [{"step": 2, "prompt": p, "text": t} for p, t in zip(PROMPTS, expected, strict=True)]
    losses = [[row["loss"] for row in logged(tmp_path / layout)] for layout in layouts]
    assert all(one == pytest.approx(losses[0], abs=1e-5) and len(one) == 2 for one in losses)
