"""Runs under `ds-harness launch` with faults drawn at random; each must end as if nothing had happened.

    python scripts/bench/chaos.py [--faults 500] [--seed 1] [--parallel 3] [--layouts pp2 tp2] [--output FILE]

A fault is a signal to a process of the run (the supervisor, an agent, a rank) at a random moment, in a save, in an
export or in a restart; damage to the newest checkpoint after the supervisor was killed; and as root a full disk and a
link that is down. A run passes if it ends with exit code 0, with every step once in metrics.jsonl, with the samples and
the final loss of the undisturbed run to the bit, without a process left. The results file is read again, so a campaign
can be made in parts. Most of a run's time is waiting, so that `--parallel` runs at once are no trouble to each other.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from chaos_run import IS_ROOT, LAYOUTS, MACHINE, MOMENTS, SIGNALS, Run
from report import RESULTS, write_report


def undisturbed(layout: str) -> float:
    """Return the final loss of a run without faults."""
    run = Run(layout, Path(tempfile.mkdtemp()), random.Random(0))
    run.end()
    loss = run.rows()[-1]["loss"]
    run.close(keep=False)
    return loss


def disturbed(layout: str, loss: float, seed: int, kinds: list[str], most: int) -> dict[str, object]:
    """Make a run with a few faults, `most` at most; return what they were and what was wrong."""
    draw, folder = random.Random(seed), Path(tempfile.mkdtemp())
    run, faults = Run(layout, folder, draw), []
    moments = [draw.choice(MOMENTS) for _ in range(draw.randint(min(4, most), most))]
    for moment in sorted(moments, key="export".__eq__):  # nothing is left to disturb after it
        if run.supervisor.poll() is not None:
            run.end()
            if run.supervisor.returncode == 0:
                break
            run.start()
        if (fault := run.fault(moment, kinds)) is not None:
            faults.append(fault)
    wrong = run.wrong(loss)
    run.close(keep=bool(wrong))
    if wrong:
        print(f"kept: {folder}")
    return {"layout": layout, "seed": seed, "faults": faults, "wrong": wrong}


def main() -> int:
    """Draw runs until there are enough faults; write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no new run after this many seconds")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--most", type=int, default=8, help="most faults per run: short runs are made in less time")
    kinds = [*SIGNALS, "damage", *(MACHINE if IS_ROOT else ())]
    parser.add_argument("--kinds", nargs="+", default=[*SIGNALS, *kinds], choices=kinds)
    parser.add_argument("--output", type=Path, default=RESULTS / "chaos.json")
    args = parser.parse_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {"losses": {}, "runs": []}
    for layout in args.layouts:
        if layout not in result["losses"]:
            result["losses"][layout] = undisturbed(layout)
            write_report(args.output, result, what=__doc__)
    campaign(args, result)
    return bool(result["failed_runs"])


def campaign(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Add runs to the table, `args.parallel` at once, until there are enough faults or the time is over."""
    until, begun = time.monotonic() + args.seconds, len(result["runs"])
    running: set[Future[dict[str, object]]] = set()
    with ThreadPoolExecutor(args.parallel) as threads:
        while running or (counted(result) < args.faults and time.monotonic() < until):
            while len(running) < args.parallel and counted(result) < args.faults and time.monotonic() < until:
                layout, seed = args.layouts[begun % len(args.layouts)], args.seed * 10_000 + begun
                running.add(threads.submit(disturbed, layout, result["losses"][layout], seed, args.kinds, args.most))
                begun += 1
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for run in (future.result() for future in ended):
                print(json.dumps(run), flush=True)
                result["runs"].append(run)
            result["faults"] = dict(Counter(fault for run in result["runs"] for fault in run["faults"]).most_common())
            result["failed_runs"] = sum(bool(run["wrong"]) for run in result["runs"])
            write_report(args.output, result, what=__doc__)


def counted(result: dict[str, Any]) -> int:
    """Return how many faults the table holds."""
    return sum(len(run["faults"]) for run in result["runs"])


if __name__ == "__main__":
    sys.exit(main())
