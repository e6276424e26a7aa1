"""Start ranks on this machine that run many compositions, and start new ones if a composition kills or stalls them.

Ranks are forked from a server process that has done the imports, so they start in a fraction of a second.
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
from harness.errors import text_of
from harness.topology.env import LOOPBACK, changed_environment, free_port, inherited, replace_environment
from harness.topology.processes import SAFE_PATH

QUIET = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables of the ranks and their server; modules read them when they are imported."""
LINES = "lines"
ERROR = "error_"  # prefix of the file in which a rank writes why it failed; the time follows
Worker: TypeAlias = Callable[[Path, int], None]
"""Called on all ranks with a folder and a number: runs `FOLDER/lines` from that line on; rank 0 writes the outcome of
line N to `N.json`."""
START_S = 60.0  # for imports, in addition to the limit of the first composition
GRACE_S = 2.0  # time for the other ranks to end, or to write the outcome, after one has ended


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
    """Have `worker` run lines on `ranks` ranks, and report the outcome of each, by its number, as soon as it is known.

    The outcome of a line that takes longer than `limit_s` seconds, or ends a rank, is an error.

    Args:
        folder: an empty folder.
        root: root of another copy of the harness, which the ranks import instead of this one.
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
    """Yield the outcomes of the lines with these numbers, until all are done or one has ended the ranks."""
    port = free_port()
    for path in folder.glob(f"{ERROR}*"):  # of an earlier launch
        path.unlink()
    processes = [
        _server().Process(target=_rank, args=(rank, ranks, port, folder, _name(worker), numbers.start, root))
        for rank in range(ranks)
    ]
    with changed_environment({**QUIET, SAFE_PATH: "1"}):  # the server, which starts with the first rank, inherits them
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
    """Once a rank has ended, wait a moment for the others to end or to write the outcome to `path`."""
    patience = time.monotonic() + GRACE_S
    while not path.exists() and time.monotonic() < patience:
        if _alive(processes) or not any(process.is_alive() for process in processes):
            return
        time.sleep(0.05)


def _first_error(folder: Path, codes: Sequence[int]) -> str:
    """Return the error of the rank that failed first: the others fail because it is gone."""
    if killed := next(((rank, -code) for rank, code in enumerate(codes) if code < 0), None):
        return f"rank {killed[0]} was ended by signal {killed[1]}"
    first = min(folder.glob(f"{ERROR}*"), default=None)
    return first.read_text() if first is not None else f"the ranks ended with exit codes {codes}"


def _server() -> ForkServerContext:
    """Return the multiprocessing context whose server has done the imports of a rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.verify.trials.execute", "harness.verify.trials.preload"])
    return context


def _name(worker: Worker) -> tuple[str, str]:
    return worker.__module__, worker.__name__


def _rank(
    rank: int, ranks: int, port: int, folder: Path, worker: tuple[str, str], first: int, root: Path | None
) -> None:
    """Run as one rank, in a process of its own: join the process group and call the worker. Does not return."""
    import torch
    import torch.distributed as dist

    place: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    replace_environment({**inherited(), **QUIET, **{name: str(value) for name, value in place.items()}})
    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    gc.freeze()  # else each garbage collection visits everything that is imported, which takes half a second
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
        said = f"rank {rank}: {type(error).__name__}: {text_of(error, 300)}"
        (folder / f"{ERROR}{time.monotonic_ns():020}").write_text(said)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of gloo would wait for the others


def _import_from(root: Path) -> None:
    """Forget the imported harness, so that this process imports another copy of it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "harness"]:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
