"""Measures what this machine's processor does for one rank: the constants of a device file of the planner.

`python -m harness.parallel.speed` prints the rates of one rank with one thread; with the number of a rank and a file to
meet at, those of the link between two ranks. Each figure is the best of several tries, as other work on the
machine can only slow them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional

from harness.parallel.collectives.of_group import leave_memory, share_memory, sum_in_place

TRIES = 7
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def best_seconds(work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    """Return the least seconds of several tries, after one to warm up: of this thread, that of others left out."""
    work()
    found = []
    for _ in range(TRIES):
        begin = clock()
        work()
        found.append(clock() - begin)
    return min(found)


def matmul_flops(dtype: torch.dtype, size: int = 768) -> float:
    """Return the operations a second of a product of squares."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / best_seconds(lambda: a @ b)


def attention_flops(length: int = 512, heads: int = 8, size: int = 64) -> float:
    """Return the operations a second of causal attention, half of the scores counted."""
    q, k, v = (torch.randn(1, heads, length, size) for _ in range(3))
    work = 2 * heads * length**2 * size
    return work / best_seconds(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def copied_bytes(elements: int = 2**24) -> float:
    """Return the bytes a second that copying a large tensor reads and writes."""
    source, target = torch.ones(elements), torch.empty(elements)
    return 2 * 4 * elements / best_seconds(lambda: target.copy_(source))


def operation_seconds(count: int = 300) -> float:
    """Return the seconds of one small operation that autograd records."""
    start = torch.ones(8, requires_grad=True)

    def chain() -> torch.Tensor:
        value = start
        for _ in range(count):
            value = value * 1.0
        return value

    return best_seconds(chain) / count


def link(sizes: tuple[int, int] = (2**10, 2**22)) -> tuple[float, float]:
    """Return the seconds of an all-reduce of a few and of many float32, as a run of one host makes it; all ranks call
    it."""
    world = dist.group.WORLD
    assert world is not None, "the ranks have met"
    few, many = (torch.ones(size) for size in sizes)
    clock = time.perf_counter  # of which a part is spent waiting
    return best_seconds(lambda: sum_in_place(few, world), clock), best_seconds(lambda: sum_in_place(many, world), clock)


def main() -> None:
    """Print the measurements as JSON."""
    torch.set_num_threads(1)
    if sys.argv[1:]:
        rank, meeting = sys.argv[1:]
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
        share_memory([dist.group.WORLD])
        few, many = link()
        measured = {"hop_seconds": few / 2, "bytes_per_second": 4 * 2**22 / max(many - few, 1e-9)}
        leave_memory()
        dist.destroy_process_group()
    else:
        measured = {name: matmul_flops(dtype) for name, dtype in DTYPES.items()}
        measured |= {"attention": attention_flops(), "memory": copied_bytes(), "operation": operation_seconds()}
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
