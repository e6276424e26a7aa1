"""Freed memory is kept for the next large tensor on a CPU, unless the environment says how."""

from __future__ import annotations

import multiprocessing
import os
import resource

import pytest
import torch

from harness.parallel.memory import keep_freed_memory

SIZE = 256 << 20  # more than glibc keeps by itself


def faults_of_the_second_block(device: str, variables: dict[str, str]) -> int:
    """Page faults of a large block that is made where another one was freed, in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.environ.update(variables)
        keep_freed_memory(torch.device(device))
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            block = b"x" * SIZE
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            del block
        os.write(write, str(faults).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(read, 100))


@pytest.mark.thorough
def test_freed_memory_is_kept_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    with multiprocessing.get_context("spawn").Pool(1) as fresh:  # the heap of this process has holes of other tests
        alone, on_cpu, as_the_user_says = fresh.starmap(
            faults_of_the_second_block, [("meta", {}), ("cpu", {}), ("cpu", {"MALLOC_ARENA_MAX": "4"})]
        )
    assert alone > SIZE / (2 << 20)  # pages of up to 2 MiB
    assert on_cpu < alone / 10
    assert as_the_user_says > alone / 2
