"""A rank that is stopped before the ranks have met ends the run; one without peers may take its time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.topology.env import free_port
from tests.support.ranks import script_on_ranks
from tests.support.training import logged

pytestmark = pytest.mark.ranks

HOLDER = """
import fcntl, pathlib, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""
WAITER = """
import fcntl, sys
from harness.console import plain_console
from harness.resilience.watch.meeting import watching_for_stopped_ranks
with watching_for_stopped_ranks(1.0, plain_console(1)):
    fcntl.flock(open(sys.argv[1], "w"), fcntl.LOCK_EX)
"""


def test_a_rank_that_is_stopped_while_it_holds_a_lock_ends_the_run(tmp_path: Path) -> None:
    lock, held, records = tmp_path / "lock", tmp_path / "held", tmp_path / "records"
    records.mkdir()
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment = {**os.environ, **launched, "DS_HARNESS_RECORDS": str(records)}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock), str(held)], env={**environment, "RANK": "0"})
    while not held.exists():
        time.sleep(0.01)
    holder.send_signal(signal.SIGSTOP)
    waiter = subprocess.run(
        [sys.executable, "-c", WAITER, str(lock)],
        env={**environment, "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert waiter.returncode == 1
    assert (
        "rank 0 (host" in waiter.stderr and "is stopped (process state T), and the others wait for it" in waiter.stderr
    )
    assert holder.wait(10) == -signal.SIGKILL
    assert json.loads((records / "rank-0.json").read_text())["error"] == "Hang"


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
    (tmp_path / "loader.py").write_text(LOADER)
    done = script_on_ranks(1, tmp_path / "loader.py", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert len(logged(tmp_path / "run")) == 12
