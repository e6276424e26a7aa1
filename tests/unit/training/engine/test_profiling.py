"""DeepSpeed's own measurements come out where the harness drives its engine: at their step, and at the end."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from harness import Trainer, TrainingArguments

POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(8)]


@pytest.fixture
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back the log of communication as it was: DeepSpeed has one for all engines of a process."""
    for name in ("enabled", "verbose", "prof_all", "comms_dict"):
        monkeypatch.setattr(deepspeed.comm.comms_logger, name, getattr(deepspeed.comm.comms_logger, name))


def train(folder: Path, **config: Any) -> None:
    batch = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}
    args = TrainingArguments(str(folder / "run"), deepspeed_config={**batch, **config}, max_steps=3, save_steps=0)
    layers = [nn.Linear(2, 4), nn.Linear(4, 1)]
    with closing(Trainer(layers, args, POINTS, loss_fn=nn.functional.mse_loss)) as trainer:
        trainer.train()


@pytest.mark.parametrize("step", [2, 9])
def test_the_profile_of_a_step_is_written_where_the_run_comes_to_it(step: int, tmp_path: Path) -> None:
    file = tmp_path / "run/profiles/flops.txt"
    train(tmp_path, flops_profiler={"enabled": True, "profile_step": step, "output_file": "profiles/flops.txt"})
    if step == 9:
        assert not file.exists()
        return
    text = file.read_text()
    assert text.count("DeepSpeed Flops Profiler") == 1 and "Profile Summary at step 2" in text


def test_what_was_communicated_is_summed_up_at_the_end(
    tmp_path: Path, no_log: None, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, comms_logger={"enabled": True, "prof_all": True})
    out, error = capfd.readouterr()
    assert (out + error).count("Comm. Op") == 1
    train(tmp_path / "again", comms_logger={"enabled": False})
    out, error = capfd.readouterr()
    assert "Comm. Op" not in out + error
