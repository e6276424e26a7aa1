"""Resuming with other hyperparameters: what the resumed run was given is what its steps use, in every engine."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from harness import Trainer, TrainerCallback, TrainingArguments
from harness.checkpoint import integrity
from harness.checkpoint.directories import read_manifest
from harness.console import Console
from harness.training.saving.resume import resume_named
from tests.support.ranks import run_ranks
from tests.support.training import Job, logged, rows, tiny_model
from tests.support.workers import refusal_of

pytestmark = pytest.mark.ranks

FIRST = {"max_steps": 2, "learning_rate": 2e-3, "weight_decay": 0.0, "adam_beta1": 0.9, "max_grad_norm": 0.5}
THEN = {"max_steps": 4, "learning_rate": 1e-3, "weight_decay": 0.3, "adam_beta1": 0.7, "max_grad_norm": 0.2}


def train_in_two_parts(jobs: list[Job], folder: str) -> list[list[dict[str, Any]]]:
    """The metrics of each job: two steps with the values FIRST, two more with THEN from their checkpoint."""
    curves = []
    for number, job in enumerate(jobs):
        place = Path(folder) / f"{number}-{job.layout}"
        for values, resume in ((FIRST, None), (THEN, "auto")):
            arguments = TrainingArguments(
                deepspeed_config=job.deepspeed_config(),
                output_dir=str(place),
                save_steps=2,
                resume_from_checkpoint=resume,
                **values,
            )
            trainer = Trainer(job.model, arguments, rows())
            trainer.train()
            trainer.close()
        curves.append(logged(place))
    return curves


def plain(model_dir: str) -> list[tuple[float, float]]:
    """Learning rate and loss of each step, by torch alone, with the linear schedule of each part."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    ids = torch.tensor([row["input_ids"] for row in rows()])
    wide = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": wide}, {"params": [p for p in model.parameters() if p.dim() < 2]}]
    optimizer = torch.optim.AdamW(groups)
    seen = []
    for step in range(4):
        values = FIRST if step < 2 else THEN
        rate = values["learning_rate"] * (1 - step / values["max_steps"])
        for group, decay in zip(optimizer.param_groups, (values["weight_decay"], 0.0), strict=True):
            group.update(lr=rate, betas=(values["adam_beta1"], 0.999), weight_decay=decay)
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), values["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        seen.append((rate, loss.item()))
    return seen


@pytest.mark.parametrize(
    "layouts",
    [("pp2z1", "dp2z3"), pytest.param(("pp2z0", "tp2z1", "dp2z2"), marks=pytest.mark.thorough)],
    ids=["first", "others"],
)
def test_what_the_resumed_run_was_given_is_what_its_steps_use(layouts: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", True)
    jobs = [Job(model, layout) for layout in layouts]
    wanted = plain(model)
    for rank in run_ranks(2, train_in_two_parts, jobs, str(tmp_path)):
        for job, steps in zip(jobs, rank, strict=True):
            for row, (rate, loss) in zip(steps, wanted, strict=True):
                assert row["learning_rate"] == pytest.approx(rate, rel=1e-9), job.layout
                assert row["loss"] == pytest.approx(loss, rel=1e-5), (job.layout, row["step"])
    run = json.loads((tmp_path / f"0-{layouts[0]}" / "run.json").read_text())
    assert {name: run["arguments"][name] for name in THEN} == THEN


def spoil_and_resume(model: str, folder: str) -> tuple[list[int], list[dict[str, Any]], list[str]]:
    """Steps at which a run went on, whose newest checkpoint was spoilt without a change of size, or was not seen yet by
    one rank; what it was told, and what every rank says of a file that rank 1 alone cannot read."""
    place = Path(folder) / "spoilt"
    job = Job(model, "pp2z1")

    def begin(resume: str | None) -> Trainer:
        arguments = TrainingArguments(
            deepspeed_config=job.deepspeed_config(),
            output_dir=str(place),
            max_steps=4,
            save_steps=2,
            resume_from_checkpoint=resume,
        )
        return Trainer(job.model, arguments, rows())

    first = begin(None)
    first.train()
    first.close()
    whole = logged(place)
    if dist.get_rank() == 0:
        spoilt = place / "checkpoint-4" / "exp_avg.safetensors"
        content = bytearray(spoilt.read_bytes())
        content[-1] ^= 1  # one bit
        spoilt.write_bytes(content)
    dist.barrier()
    said = refusal_of(lambda: begin(str(place / "checkpoint-4")))
    again = begin("auto")
    step = again.state.global_step
    again.train()
    readable, cut = place / "checkpoint-2", place / "cut"
    if dist.get_rank() == 1:
        shutil.copytree(readable, cut)
        os.truncate(cut / "exp_avg_sq.safetensors", 1000)
    unread = refusal_of(lambda: again.run.engine_state.load(cut if dist.get_rank() == 1 else readable))
    losses = [*whole, *logged(place)]
    listed = integrity.numbered
    with patch.object(integrity, "numbered", lambda folder: listed(folder)[: -1 if dist.get_rank() else None]):
        resume_named(again.run, True)  # rank 1 does not see the newest yet
    steps = [step, len(whole), again.state.global_step]
    again.close()
    return steps, losses, [said, unread]


def test_a_spoilt_checkpoint_is_left_out_by_all_ranks(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", True)
    for (step, count, late), rows_seen, (said, unread) in run_ranks(2, spoil_and_resume, model, str(tmp_path)):
        assert (step, late) == (2, 4)
        assert "differs from what was saved" in said and "checkpoint-4" in said
        assert "cut/exp_avg_sq.safetensors: its tensors cannot be read" in unread
        whole, again = ([row["loss"] for row in part] for part in (rows_seen[:count], rows_seen[count:]))
        assert again == pytest.approx(whole, rel=1e-6)


def save_in_spite_of_faults(model: str, folder: str) -> tuple[list[str], list[int], str]:
    """The checkpoints and the steps in the metrics of a run whose disk was full, and whose directory was removed; what
    was said."""
    job, place, said = Job(model, "pp2z1"), Path(folder) / "full", io.StringIO()
    arguments = TrainingArguments(
        deepspeed_config=job.deepspeed_config(), output_dir=str(place), max_steps=6, save_steps=1, save_total_limit=2
    )
    callbacks = [FullDisk(), RemovedDirectory(place)]
    console = Console(out=said, error=said, speaks=dist.get_rank() == 0)
    trainer = Trainer(job.model, arguments, rows(), callbacks=callbacks, console=console)
    assert trainer.train().global_step == 6
    trainer.close()
    return (
        sorted(path.name for path in place.glob("*checkpoint-*")),
        [row["step"] for row in logged(place)],
        said.getvalue(),
    )


class FullDisk(TrainerCallback):
    """Lets rank 0 write no more than some kilobytes to a file while the checkpoints of steps 2 and 3 are written."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["trainer"].checkpoints.finish()
        if dist.get_rank() == 0:
            most = 1 << 14 if state.global_step in (1, 2) else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


class RemovedDirectory(TrainerCallback):
    """Looks at the checkpoints before step 5, and removes the whole directory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.kept: list[str] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4 and dist.get_rank() == 0:
            kept = sorted(path.name for path in self.place.glob("*checkpoint-*"))
            assert kept == ["checkpoint-1", "checkpoint-4"]  # a whole one is kept in the place of those that failed
            shutil.rmtree(self.place)


@pytest.mark.on_host("the simulated group exchanges files, the size of which is limited here")
def test_a_full_disk_and_a_removed_directory_cost_checkpoints_and_no_step(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", "llama", True)
    results = run_ranks(2, save_in_spite_of_faults, model, str(tmp_path))
    for kept, steps, _ in results:
        assert kept == ["checkpoint-5", "checkpoint-6"]
        assert steps == [5, 6]
    failed = [line for line in results[0][2].splitlines() if "no checkpoint of step" in line]
    size = sum(size for size, _ in read_manifest(tmp_path / "full" / "checkpoint-5").files.values())
    assert len(failed) == 2
    for line, step in zip(failed, (2, 3), strict=True):
        found = re.fullmatch(
            rf"warning: no checkpoint of step {step}: .*/writing-checkpoint-{step}/model.safetensors: [\d,]+ bytes "
            rf"cannot be written: File too large \(it needs ([\d,]+) bytes, [\d,]+ are free in {tmp_path}/full\); "
            "training continues",
            line,
        )
        assert found and 0.9 * size < int(found[1].replace(",", "")) <= size, line
