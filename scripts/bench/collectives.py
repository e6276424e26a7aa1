"""Collectives of a host's ranks: through the memory that they share, beside torch.distributed over gloo.

    OMP_NUM_THREADS=1 python scripts/bench/collectives.py [--ranks 2] [--rounds 3]

Sums, gathers, shares of sums, and the means of ZeRO-3's gradients (a list of tensors, of each of which a rank gets a
part). Both ways are measured in turns, in the same processes; their results are compared. Of each: the least seconds of
the rounds, and the processor's, mean over the ranks. Writes results/collectives.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from harness.extras import host_collectives  # noqa: E402
from harness.extras.host_memory import HostMemory  # noqa: E402
from harness.parallel import collectives  # noqa: E402
from scripts.bench.report import RESULTS, write_report  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

KIB = (64, 1536, 16384)
"""Sizes of the tensors: a small one, a hidden state of 4 x 256 tokens of width 384, and what takes several pieces."""
REPEATS = {64: 50, 1536: 20, 16384: 4}
TENSORS = 12  # of the list whose means are made


def ways(x: Tensor, group: dist.ProcessGroup) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Return each collective twice: over gloo, and as a run of one host makes it. `x` stays as it is."""
    ranks = dist.get_world_size(group)
    parts = list(x.split(len(x) // TENSORS))

    def gathered() -> Tensor:
        whole = x.new_empty(ranks * len(x))
        dist.all_gather_single(whole, x, group=group)
        return whole

    def gathered_in_memory() -> Tensor:
        whole = x.new_empty(ranks * len(x))
        assert host_collectives.all_gather_in_memory(whole, x, group), "the ranks share memory"
        return whole

    def scattered(flat: Tensor) -> Tensor:
        share = x.new_empty(len(flat) // ranks)
        dist.reduce_scatter_single(share, flat, group=group)
        return share

    def summed() -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    def means() -> Tensor:
        """As DeepSpeed does it: all ranks' parts side by side, in one tensor."""
        by_rank = [each.chunk(ranks)[rank] for rank in range(ranks) for each in parts]
        return scattered(torch.cat(by_rank).div_(ranks))

    def means_in_memory() -> Tensor:
        found = host_collectives.means_in_memory(parts, group)
        assert found is not None, "the ranks share memory"
        return torch.cat(found)

    return {
        "sum": (summed, lambda: collectives.all_reduce(x, group)),
        "gather": (gathered, gathered_in_memory),
        "share of a sum": (lambda: scattered(x), lambda: collectives.start_reduce_scatter(x, group)()),
        "means of parts": (means, means_in_memory),
    }


def measured(work: Callable[[], Tensor], repeats: int) -> tuple[float, float]:
    """Return the seconds, and the processor's, of one call."""
    work()
    dist.barrier()
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - begun) / repeats, (time.process_time() - used) / repeats


def compare(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the fastest round for each collective, size and method. Runs on each rank."""
    torch.set_num_threads(1)
    group = dist.group.WORLD
    assert group is not None, "the ranks have met"
    collectives.share_memory([group], HostMemory.open)
    found = {}
    for size in KIB:
        x = torch.randn(size * 256 // (TENSORS * 8) * (TENSORS * 8), generator=torch.Generator().manual_seed(size))
        for name, both in ways(x, group).items():
            first, second = (way() for way in both)
            torch.testing.assert_close(first, second)
            tries = [[measured(way, REPEATS[size]) for way in both] for _ in range(rounds)]
            found[f"{name}, {size} KiB"] = [
                (min(each[way][0] for each in tries), min(each[way][1] for each in tries)) for way in (0, 1)
            ]
    collectives.leave_memory()
    return found


def main() -> None:
    """Measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    everywhere = run_ranks(options.ranks, "scripts.bench.collectives:compare", options.rounds, timeout_s=300)
    rows: dict[str, Any] = {}
    for name in everywhere[0]:
        seconds, used = ([fmean(each[name][way][kind] for each in everywhere) for way in (0, 1)] for kind in (0, 1))
        rows[name] = {
            "gloo_us": [round(1e6 * value, 1) for value in (seconds[0], used[0])],
            "shared_memory_us": [round(1e6 * value, 1) for value in (seconds[1], used[1])],
            "share_of_time": round(seconds[1] / seconds[0], 3),
            "share_of_processor_time": round(used[1] / used[0], 3),
        }
        print(json.dumps({name: rows[name]}), flush=True)
    load = [round(each, 1) for each in os.getloadavg()]
    content = {"ranks": options.ranks, "cores": os.cpu_count(), "load_average": load, "collectives": rows}
    write_report(RESULTS / "collectives.json", content, what=str(__doc__))


if __name__ == "__main__":
    main()
