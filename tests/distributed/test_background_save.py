"""A checkpoint is written beside the steps that follow, which do not wait for it; a kill in between loses nothing."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from harness import Trainer, TrainerCallback
from harness.checkpoint.tensors import tensor_writer
from harness.checkpoint.tensors.whole_tensors import PlannedFiles
from harness.device.process_group import all_arrive
from harness.errors import UserError
from harness.extras import output_checks
from tests.support.ranks import run_ranks
from tests.support.training import Job, arguments_of, logged, rows, tiny_model

pytestmark = pytest.mark.ranks

STEPS, EVERY, KILLED_AT = 7, 2, 5


class KilledWhileWriting(TrainerCallback):
    """The disk of rank 1 hangs while the checkpoint of step 4 is written; two steps later rank 0 is killed."""

    def __init__(self) -> None:
        self.hangs = threading.Event()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            kwargs["trainer"].checkpoints.finish()
            if dist.get_rank() == 1:
                tensor_writer.os.pwrite = self.hang
        if state.global_step == KILLED_AT:
            assert dist.get_rank() == 0 or self.hangs.wait(10)
            dist.barrier()
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def hang(self, *args: Any) -> int:
        self.hangs.set()
        threading.Event().wait()
        raise AssertionError


def losses(place: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in logged(place)]


def train(job: Job, place: Path, *callbacks: TrainerCallback, resume: str | None = None) -> list[tuple[int, float]]:
    changes = {"max_steps": STEPS, "save_steps": EVERY, "save_total_limit": 1, "resume_from_checkpoint": resume}
    trainer = Trainer(job.model, arguments_of(job, str(place), **changes), rows(), callbacks=callbacks)
    trainer.train()
    trainer.close()
    return losses(place)


def train_and_be_killed(job: Job, folder: str) -> None:
    train(job, Path(folder, job.layout), KilledWhileWriting())


def resume_and_compare(job: Job, folder: str) -> tuple[list[str], Any, Any]:
    assert all_arrive("where all come", 20)
    for rank in (0, 1):  # rank 1 comes when rank 0 has given up
        assert dist.get_rank() != rank or not all_arrive("where no one waits for rank 1", 0.2)
        dist.barrier()
    place = Path(folder, job.layout)
    found = sorted(path.name for path in place.glob("*checkpoint-*"))
    dist.barrier()
    return found, train(job, place, resume="auto"), train(job, Path(folder, "unbroken"))


def told(action: Callable[[], object]) -> str:
    """What a UserError says."""
    with pytest.raises(UserError) as found:
        action()
    return str(found.value)


def where_one_rank_fails(job: Job, folder: str) -> list[str]:
    """What is said when one rank cannot read a trial back, write or begin an export, write a card, or see the mount."""
    rank = dist.get_rank()
    begin = partial(Trainer, job.model, arguments_of(job, folder), rows())
    with patch.object(output_checks, "_lost", side_effect=OSError(errno.EIO, "Input/output error"), return_value=[]):
        said = [told(begin)]
    trainer = begin()
    full, gone = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.ENOTCONN, "not connected")
    with patch.object(tensor_writer.os, "pwrite", side_effect=full if rank == 1 else None, wraps=os.pwrite):
        said.append(told(trainer.save_model))
    said.append(told(lambda: trainer.save_model(f"{folder}/file/export" if rank == 1 else f"{folder}/export")))
    Path(folder, "README.md").mkdir(exist_ok=True)
    said.append(told(trainer.push_to_hub))
    with patch.object(PlannedFiles, "create", side_effect=gone), patch.object(os, "statvfs", side_effect=gone):
        said.append(told(trainer.save_checkpoint))
    trainer.close()
    return said


def test_where_one_rank_fails_all_ranks_say_why(tmp_path: Path) -> None:
    job, out = Job(tiny_model(tmp_path / "m", "gpt2", True), "pp2z1"), tmp_path / "out"
    out.mkdir()
    (out / "file").touch()
    first, second = run_ranks(2, where_one_rank_fails, job, str(out))
    assert first == second
    not_tried, not_written, not_made, no_card, not_saved = first
    assert not_tried.endswith("checkpoints cannot be written there: Input/output error")
    assert "unfinished-" in not_written
    assert not_written.endswith("model.safetensors: cannot be written: No space left on device")
    assert not_made == f"the model cannot be written: {out}/file/export: Not a directory"
    assert no_card == f"{out}/README.md: it is not a file: remove it"
    assert not_saved == "not connected"


def test_a_run_that_is_killed_while_it_writes_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    job = Job(tiny_model(tmp_path / "m", "gpt2", True, attn_pdrop=0.1), "pp2z1")
    with pytest.raises(pytest.fail.Exception):  # as rank 0 is killed
        run_ranks(2, train_and_be_killed, job, str(tmp_path))
    assert [step for step, _ in losses(tmp_path / job.layout)] == [1, 2, 3, 4, 5]  # one more than was being saved
    for found, resumed, unbroken in run_ranks(2, resume_and_compare, job, str(tmp_path)):
        assert found == ["checkpoint-2", "writing-checkpoint-4"]
        assert resumed == unbroken
    left = [
        path.name for path in (tmp_path / job.layout).iterdir() if "checkpoint" in path.name or "writing" in path.name
    ]
    assert left == [f"checkpoint-{STEPS}"]
