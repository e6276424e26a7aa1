"""A rank without peers may take its time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

LOADER = """
import sys, time
import torch
from harness import Trainer, TrainingArguments
class Data:
    read = 0
    def __len__(self): return 8
    def __getitem__(self, i):
        Data.read += 1
        return torch.ones(2), torch.ones(1)
def loss(a, b):
    if 40 < Data.read < 45:
        time.sleep(1.5)
    return (a - b).square().mean()
args = TrainingArguments(deepspeed_config={"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4},
    output_dir=sys.argv[1], max_steps=12, save_steps=0, hang_seconds=0.5)
Trainer([torch.nn.Linear(2, 1)], args, Data(), loss_fn=loss).train()
"""


def test_a_rank_without_peers_may_take_as_long_as_it_likes(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", LOADER, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 12
