"""Start ranks on this machine that run many compositions, and go on after one that kills or stalls them.

A server has imported everything once; ranks are forked from it, so that starting them costs a fraction of a second.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TypeAlias

from harness.config.values.json_object import JsonObject
from harness.topology.env import LOOPBACK, changed_environment, free_port, inherited, replace_environment

QUIET = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What ranks and their server are started with: read when modules are imported."""
LINES = "lines"
ERROR = "error_"  # a rank's file of why it has failed begins so, and goes on with the time
Worker: TypeAlias = Callable[[Path, int], None]
"""Runs the lines of `FOLDER/lines` from a number on, on all ranks; rank 0 writes what comes of line N to N.json."""
START_S = 60.0  # for imports, on top of the first composition's time
GRACE_S = 2.0  # how long the other ranks may take to end after one has


def run_on_ranks(
    lines: Sequence[str],
    ranks: int,
    folder: Path,
    *,
    worker: Worker,
    limit_s: float,
    report: Callable[[int, JsonObject], None],
    root: Path | None = None,
) -> None:
    """Have `worker` run lines on `ranks` ranks, and report what came of each, by its number, as soon as it is known.

    One that takes longer than `limit_s` seconds, or ends a rank, has an error that says so. `folder` is empty.
    `root`: of another copy of the harness, which the ranks import in the place of this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LINES).write_text("".join(f"{line}\n" for line in lines))
    first = 0
    while first < len(lines):
        for number, outcome in _launch(worker, ranks, folder, range(first, len(lines)), limit_s, root):
            report(number, outcome)
            first = number + 1


def _launch(
    worker: Worker, ranks: int, folder: Path, numbers: range, limit_s: float, root: Path | None
) -> Iterator[tuple[int, JsonObject]]:
    """Yield what comes of the lines of these numbers, until all are done or one has ended the ranks."""
    port = free_port()
    for path in folder.glob(f"{ERROR}*"):  # of a launch before
        path.unlink()
    processes = [
        _server().Process(target=_rank, args=(rank, ranks, port, folder, _name(worker), numbers.start, root))
        for rank in range(ranks)
    ]
    with changed_environment(QUIET):  # which the server, that starts with the first rank, inherits
        for process in processes:
            process.start()
    limit = time.monotonic() + limit_s + START_S
    try:
        for number in numbers:
            path = folder / f"{number}.json"
            while not path.exists() and _alive(processes) and time.monotonic() < limit:
                time.sleep(0.01)
            _let_end(processes, path)
            if path.exists():
                outcome = json.loads(path.read_text())
            elif time.monotonic() >= limit:
                outcome = {"error": f"no answer within {limit_s:.0f} s"}
            else:
                outcome = {"error": _first_error(folder, [process.exitcode or 0 for process in processes])}
            yield number, outcome
            if "error" in outcome:
                return
            limit = time.monotonic() + limit_s
    finally:
        for process in processes:
            process.kill()
            process.join()


def _alive(processes: Sequence[ForkServerProcess]) -> bool:
    return all(process.is_alive() for process in processes)


def _let_end(processes: Sequence[ForkServerProcess], path: Path) -> None:
    """Give the ranks a moment to say what has happened, once one of them has ended."""
    patience = time.monotonic() + GRACE_S
    while not path.exists() and time.monotonic() < patience:
        if _alive(processes) or not any(process.is_alive() for process in processes):
            return
        time.sleep(0.05)


def _first_error(folder: Path, codes: Sequence[int]) -> str:
    """Return what the rank that failed first says: the others fail because it has gone."""
    if killed := next(((rank, -code) for rank, code in enumerate(codes) if code < 0), None):
        return f"rank {killed[0]} was ended by signal {killed[1]}"
    first = min(folder.glob(f"{ERROR}*"), default=None)
    return first.read_text() if first is not None else f"the ranks ended with exit codes {codes}"


def _server() -> ForkServerContext:
    """Return the context whose server has imported what ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.parity.execute", "harness.parity.preload"])
    return context


def _name(worker: Worker) -> tuple[str, str]:
    return worker.__module__, worker.__name__


def _rank(
    rank: int, ranks: int, port: int, folder: Path, worker: tuple[str, str], first: int, root: Path | None
) -> None:
    """Be a rank, in a process of its own."""
    import torch
    import torch.distributed as dist

    place: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    replace_environment({**inherited(), **QUIET, **{name: str(value) for name, value in place.items()}})
    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    gc.freeze()  # else each collection of garbage looks through all that is imported, for half a second
    dist.init_process_group("gloo")
    code = 1
    try:
        if root is not None:
            _import_from(root)
        run: Worker = getattr(import_module(worker[0]), worker[1])
        run(folder, first)
        dist.barrier()
        code = 0
    except BaseException as error:
        said = f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        (folder / f"{ERROR}{time.monotonic_ns():020}").write_text(said)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of gloo would wait for the others


def _import_from(root: Path) -> None:
    """Have this process import the harness anew, from another copy of it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "harness"]:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
