"""The share of the time in which a run on four ranks makes steps that count, while a rank is killed every minute.

    python scripts/bench/effective_time.py [--minutes 5]

Two stages of two tensor-parallel ranks under `ds-harness launch`. The seconds of all steps in metrics.jsonl, where each
stands once, are divided by the seconds since the first one: restarts, saves and repeated steps are lost time. It should
have the machine for itself.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import chaos_run
from report import RESULTS, write_report

EVERY_S, SAVE_STEPS = 60.0, 20


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=5)
    minutes = parser.parse_args().minutes
    chaos_run.STEPS, chaos_run.SAVE_STEPS = 1_000_000, SAVE_STEPS
    draw = random.Random(0)
    run = chaos_run.Run("pp2 x tp2", Path(tempfile.mkdtemp()), draw)
    while not run.rows():
        time.sleep(0.01)
    begun = time.time()
    for minute in range(minutes):
        time.sleep(max(0.0, begun + EVERY_S * (minute + 0.5) - time.time()))
        os.kill(run.processes()[f"rank {draw.randrange(4)}"], signal.SIGKILL)
    time.sleep(max(0.0, begun + EVERY_S * minutes - time.time()))
    rows, elapsed = run.rows(), time.time() - begun
    run.supervisor.send_signal(signal.SIGTERM)
    run.end()
    run.close(keep=False)
    result = {
        "cores": os.cpu_count(),
        "ranks": 4,
        "killed": minutes,
        "seconds": round(elapsed, 1),
        "steps": len(rows),
        "step_s": round(sum(row["step_seconds"] for row in rows) / len(rows), 4),
        "effective": round(sum(row["step_seconds"] for row in rows) / elapsed, 3),
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(result, write_report(RESULTS / "effective_time.json", result, what=__doc__))


if __name__ == "__main__":
    main()
