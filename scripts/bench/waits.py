"""How often the host of each rank waits for its device in a steady step, by place and layout, on the simulated device.

    OMP_NUM_THREADS=1 python scripts/bench/waits.py [--layouts pp2z1 dp2z3] [--output FILE]

A layout is named as in the tests: pp2z1 is two pipeline stages with ZeRO-1. Each step has four micro-batches with
pipeline stages, two without; it is logged. The program's own waits come first, then those that DeepSpeed makes within a
call of it. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.report import RESULTS, write_report  # noqa: E402
from tests.support import ranks  # noqa: E402
from tests.support.simulated_device.device import why_not  # noqa: E402
from tests.support.simulated_device.waiting import is_own, waits_of_all  # noqa: E402
from tests.support.training import Job, tiny_model  # noqa: E402

LAYOUTS = ("pp2z0", "pp2z1", "tp2z0", "tp2z1", "dp2z0", "dp2z1", "dp2z2", "dp2z3")


def main() -> None:
    """Count, print, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--output", type=Path, default=RESULTS / "waits.json")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"waits: {reason}")
    ranks.DEVICE[0] = "simulated"
    with tempfile.TemporaryDirectory() as name:
        model = tiny_model(Path(name) / "llama", "llama", False)
        found: dict[str, list[dict[str, float]]] = {layout: [] for layout in args.layouts}
        for size in (2, 4):
            jobs = [Job(model, layout) for layout in args.layouts if ranks_of(Job(model, layout)) == size]
            for of_rank in ranks.run_ranks(size, waits_of_all, jobs, name, timeout_s=500) if jobs else ():
                for job, waits in zip(jobs, of_rank, strict=True):
                    found[job.layout].append(waits)
    for layout, rows in found.items():
        own = max(sum(count for place, count in waits.items() if is_own(place)) for waits in rows)
        all_ = max(sum(waits.values()) for waits in rows)
        print(f"{layout}: {own:g} own, {all_ - own:g} of DeepSpeed's, on the rank that waits most often")
        for rank, waits in enumerate(rows):
            for place, count in waits.items():
                print(f"  rank {rank}: {count:g} x {place}")
    write_report(args.output, {"waits of each rank in a step": found}, what=str(__doc__))


def ranks_of(job: Job) -> int:
    """Return the number of ranks of a layout."""
    return job.size("pp") * job.size("tp") * job.size("dp")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
