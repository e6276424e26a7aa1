"""Freed memory is kept for the next large tensor on a CPU, unless the environment says how."""

from __future__ import annotations

import ctypes
import os
import resource

import pytest
import torch

from harness.parallel.memory import M_MMAP_MAX, M_TRIM_THRESHOLD, keep_freed_memory

SIZE = 512 << 20  # more than glibc keeps by itself, and than tests before in this process have freed in one piece


def faults_of_the_second_block(device: str) -> int:
    """Page faults of a large block that is made where another one was freed, in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        option = ctypes.CDLL(None).mallopt  # a test before may have trained in this process
        option(M_TRIM_THRESHOLD, 128 << 10)
        option(M_MMAP_MAX, 65536)
        ctypes.CDLL(None).malloc_trim(0)  # and have left room that the block would fit into
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


def test_freed_memory_is_kept_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    alone = faults_of_the_second_block("meta")
    assert alone > SIZE / (2 << 20)  # pages of up to 2 MiB
    assert faults_of_the_second_block("cpu") < alone / 10
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert faults_of_the_second_block("cpu") > alone / 2
