"""Start the training script as a user does; every run has a port of its own, so that runs may go side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.topology.env import free_port

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
    command = [*(deepspeed(ranks) if ranks else [sys.executable]), *map(str, (*program, *flags))]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s)
