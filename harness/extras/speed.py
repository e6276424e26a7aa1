"""Measure the speed of this machine's processor for one rank: the constants of a device file of the planner.

`python -m harness.extras.speed CORES` prints the rates of one rank with one thread while a rank on each other core
measures too, and those of the connection between two ranks and between twice as many as there are cores. All ranks are
forked from one process, so that they need not import torch. Each figure is the median of several tries: what a long
run gets, not the best possible.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import ceil, inf, log2
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from harness.config.model.shape import PRESETS
from harness.extras.host_memory import HostMemory
from harness.parallel.collectives import all_reduce_in_place, leave_memory, share_memory

TRIES = 9
LONG_S = 0.5  # slow work, such as fp16 without hardware support, varies little: fewer tries suffice
REPEATS = 20  # a single call takes less time than an interruption by the system
NARROW: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def usual_seconds(
    work: Callable[[], object], clock: Callable[[], float] = time.thread_time, enough_s: float = LONG_S
) -> float:
    """Return the median seconds of several tries, after one to warm up; by default the CPU time of this thread.

    Args:
        enough_s: once a third of the tries has taken so many seconds, the others are left out.
    """
    work()
    found: list[float] = []
    while len(found) < TRIES and (len(found) < TRIES // 3 or sum(found) < enough_s):
        begin = clock()
        work()
        found.append(clock() - begin)
    return median(found)


def matmul_flops(dtype: torch.dtype, size: int = 512) -> float:
    """Return FLOP/s of the three products of a linear layer: forward, and those for both gradients.

    The matrices are not square, as in layers; square ones would be up to a tenth faster.
    """
    outer = size * 11 // 4
    inputs, weight, gradient = (torch.randn(*shape).to(dtype) for shape in ((size, size), (outer, size), (size, outer)))

    def products() -> None:
        functional.linear(inputs, weight)
        gradient @ weight
        gradient.t() @ inputs

    return 3 * 2 * size * size * outer / usual_seconds(products)


def attention_flops(length: int = 512, heads: int = 8, size: int = 64) -> float:
    """Return FLOP/s of causal attention, counting half of the scores."""
    q, k, v = (torch.randn(1, heads, length, size) for _ in range(3))
    work = 2 * heads * length**2 * size
    return work / usual_seconds(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def copied_bytes(elements: int = 2**24) -> float:
    """Return the bytes per second that copying a large tensor reads and writes."""
    source = torch.ones(elements)
    target = torch.empty(elements)
    return 2 * 4 * elements / usual_seconds(lambda: target.copy_(source))


def narrow_layer_seconds(layers: int = 4) -> float:
    """Return the seconds that a layer's forward and backward take to issue their operations: its width is tiny.

    The time of a model without layers is subtracted.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = torch.ones(1, 8, dtype=torch.long)

    def seconds(count: int) -> float:
        config = AutoConfig.from_pretrained(PRESETS / "tiny-llama", **NARROW, num_hidden_layers=count)
        model = AutoModelForCausalLM.from_config(config)
        return usual_seconds(lambda: model(ids).logits.sum().backward())

    return max(seconds(layers) - seconds(0), 0.0) / layers


def link(sizes: tuple[int, int] = (2**10, 2**22)) -> tuple[float, float]:
    """Return the seconds of an all-reduce of few and of many float32 numbers, as a run on one host makes it.

    All ranks must call it. The small one is measured between matrix products, as in a layer: waiting ranks have to be
    woken, and with more ranks than cores their core may be taken.
    """
    world = dist.group.WORLD
    assert world is not None, "the ranks have met"
    few, many = (torch.ones(size) for size in sizes)
    matrix = torch.ones(192, 192)

    def layers(reduce: bool) -> None:
        for _ in range(REPEATS):
            torch.mm(matrix, matrix)
            if reduce:
                all_reduce_in_place(few, world)

    # not CPU time: a rank also waits for the others; all tries: each rank has to join in every sum, also a slow one
    seconds = partial(usual_seconds, clock=time.perf_counter, enough_s=inf)
    both = seconds(lambda: layers(reduce=True))
    dist.barrier()
    alone = seconds(lambda: layers(reduce=False))
    dist.barrier()
    return max(both - alone, 0.0) / REPEATS, seconds(lambda: all_reduce_in_place(many, world))


def rates() -> dict[str, float]:
    """Return the rates of one rank while all others measure too, because they share memory and caches; all ranks must
    call it."""
    takes: dict[str, Callable[[], float]] = {name: partial(matmul_flops, dtype) for name, dtype in DTYPES.items()}
    takes |= {"attention": attention_flops, "memory": copied_bytes, "layer": narrow_layer_seconds}
    found = {}
    for name, take in takes.items():
        dist.barrier()
        found[name] = take()
    return found


def link_rates() -> dict[str, float]:
    """Return the rates of the link between all ranks, which must call it."""
    ranks = dist.get_world_size()
    share_memory([dist.group.WORLD], HostMemory.open)
    few, many = link()
    leave_memory()
    moved = 2 * (ranks - 1) / ranks * 4 * 2**22
    hops = 2 * ceil(log2(ranks))
    return {"hop_seconds": few / hops, "bytes_per_second": moved / max(many - few, 1e-9)}


def on_ranks(ranks: int, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Fork ranks that measure together, and return what the first one finds; exit with 1 if one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_forked(rank, ranks, Path(folder), measure) for rank in range(ranks)]
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(1)  # the rank that failed has printed the reason
        found: dict[str, float] = json.loads((Path(folder) / "found").read_text(encoding="utf-8"))
    return found


def _forked(rank: int, ranks: int, folder: Path, measure: Callable[[], dict[str, float]]) -> int:
    """Return the id of a process that is this rank and then ends."""
    if child := os.fork():
        return child
    code = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
        found = measure()
        dist.destroy_process_group()
        if rank == 0:
            (folder / "found").write_text(json.dumps(found), encoding="utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Print the measurements as JSON."""
    torch.set_num_threads(1)
    cores = int(sys.argv[1])
    links = {str(ranks): on_ranks(ranks, link_rates) for ranks in (2, 2 * cores)}
    import_module("transformers.models.auto.modeling_auto")  # once for the ranks that follow
    print(json.dumps({"rank": on_ranks(cores, rates), "links": links}))


if __name__ == "__main__":
    main()
