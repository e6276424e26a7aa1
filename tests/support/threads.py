"""Ranks that are threads of this process: what is asked of tensors on several ranks, in a fraction of a second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from transformers import masking_utils

T = TypeVar("T")


def run_threads(ranks: int, function: Callable[[int], T]) -> list[T]:
    """Return what `function` returns on each of so many ranks, which it is given; raises what it raises on one."""
    store, found, raised = dist.HashStore(), {}, []
    threaded._install_threaded_pg()  # type: ignore[no-untyped-call]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)

    def be(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            found[rank] = function(rank)
        except BaseException as error:
            raised.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(ranks)]
    # `documents_apart` replaces it in each thread, and the last one to end puts the other's replacement back
    kept = patch.object(masking_utils, "find_packed_sequence_indices", masking_utils.find_packed_sequence_indices)
    try:
        with kept:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()  # type: ignore[no-untyped-call]
    if raised:
        raise raised[0]
    return [found[rank] for rank in range(ranks)]
