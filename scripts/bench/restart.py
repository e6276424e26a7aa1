"""Time lost to a killed rank: from its death to the first new step of two ranks, under `ds-harness launch`.

    python scripts/bench/restart.py [--repeat 3] [--output scripts/bench/results/restart.json]

The parts are read from when the run says something: the supervisor that it starts again, rank 0 that it prepares the
run and that it has resumed, then the first line of metrics. Measured twice: with a process that stands by, which has
imported everything when the rank is killed, and without one (`--no_standby`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from report import RESULTS, write_report

from harness.resilience.on_host.standby import TITLE

SETTLED_S = 3.0  # behind its imports
PARTS = {"noticed": "ds-harness launch: restart", "started": "preparing", "resumed": "resumed from"}
STEPS, SAVE_STEPS, FAULT_AT = 100_000, 50, 60


def run(folder: Path, *options: str) -> dict[str, float]:
    """Return seconds since the death of rank 1 until each part; `options` are those of `ds-harness launch`."""
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog; 0123456789. " * 60)
    flags = ["--deepspeed_config", "pipeline_checkpointing", "--train_file", text, "--block_size", 32]
    flags += ["--per_device_train_batch_size", 1, "--max_steps", STEPS, "--save_steps", SAVE_STEPS]
    launcher = [sys.executable, "-m", "harness.cli", "launch", "--max_restarts", 1, "--num_accelerators", 2, *options]
    command = [*launcher, "scripts/train.py", *flags, "--output_dir", folder / "run"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < FAULT_AT:
        time.sleep(0.01)
    while not options and _process(TITLE.encode()) is None:
        time.sleep(0.1)
    time.sleep(SETTLED_S)
    os.kill(_process(b"--local_rank=1") or 0, signal.SIGKILL)
    death, parts = time.time(), {}
    assert process.stdout is not None
    for line in process.stdout:
        for part, begins in PARTS.items():
            if line.startswith(begins) and (part == "noticed" or "noticed" in parts):
                parts[part] = time.time() - death
        if "resumed" in parts:
            break
    while metrics.stat().st_mtime < death + parts["resumed"] or not _rows(metrics):
        time.sleep(0.01)
    parts["first_step"] = time.time() - death
    process.terminate()
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    return {part: round(seconds, 2) for part, seconds in parts.items()}


def _rows(metrics: Path) -> list[str]:
    return metrics.read_text().splitlines()


def _process(word: bytes) -> int | None:
    """Return the process that has a word in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word in path.read_bytes().split(b"\0"):
                return int(path.parent.name)
    return None


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "restart.json")
    args = parser.parse_args()
    kinds = {"with a process that stands by": (), "without": ("--no_standby",)}
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(args.repeat):
        for kind, options in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                runs[kind].append(run(Path(folder), *options))
            print(kind, runs[kind][-1], flush=True)
    result = {
        "cores": os.cpu_count(),
        "ranks": 2,
        "seconds_since_death": {
            kind: {part: statistics.median(one[part] for one in of) for part in of[0]} for kind, of in runs.items()
        },
        "load_average": round(os.getloadavg()[0], 1),
        "runs": runs,
    }
    write_report(args.output, result, what=__doc__)
    print(json.dumps(result["seconds_since_death"]))


if __name__ == "__main__":
    main()
