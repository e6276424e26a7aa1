"""Start the training script as a user does; every run has a port of its own, so that runs may go side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.topology.env import LOOPBACK, free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SCRIPT = ROOT / "scripts" / "train.py"


def environment(**more: object) -> dict[str, str]:
    """What a run's processes get: one thread each, the commands of this environment first on the path."""
    ours = {"OMP_NUM_THREADS": 1, "PATH": f"{BIN}:{os.environ['PATH']}", **more}
    return {**os.environ, **{name: str(value) for name, value in ours.items()}}


def deepspeed(ranks: int) -> list[str]:
    """The launcher, by the name that a user types."""
    return ["deepspeed", "--master_port", str(free_port()), "--num_accelerators", str(ranks)]


def launch(
    ranks: int, *flags: object, program: Sequence[object] = (SCRIPT,), timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """`deepspeed scripts/train.py` on `ranks` processes, or plain python on none."""
    return _run([*(deepspeed(ranks) if ranks else [sys.executable]), *program, *flags], environment(), timeout_s)


def first_rank(world_size: int, *flags: object) -> subprocess.CompletedProcess[str]:
    """The script as rank 0 of ranks of which no other comes: for what is refused before they meet."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": free_port()}
    return _run([sys.executable, SCRIPT, *flags], environment(**place, **meeting), 60)


def _run(command: list[object], env: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=timeout_s)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, one a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
