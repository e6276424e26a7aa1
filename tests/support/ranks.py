"""Run a function on n real ranks and bring back what each of them returned.

`run_ranks(4, worker, *args)` starts one launcher process, forked from a server that has imported torch already. It
imports the worker's module once and forks the ranks from there: a rank costs a fork. Every rank has the launcher's
environment (RANK, WORLD_SIZE, ...), one thread, the CPU, and, unless `process_group=False`, gloo
initialised. With `--device simulated` it has the simulated device and its backend in their place, with
`--device cuda` a GPU and NCCL. A worker is a function at the top of an importable module; arguments and
results are pickled; asserts belong into the test. A rank that fails or hangs fails the test with the last
lines of all ranks, the first one to fail on top; a rank that runs out of time prints where it stands.
Nothing is left running.
"""

import faulthandler
import functools
import importlib
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from harness.resilience.on_host.standby import WITHOUT_DRIVER
from harness.topology.env import LOOPBACK, free_port
from tests.support.forkserver import ForkServer
from tests.support.simulated_device import device as simulated

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 120  # for the launcher's imports, on top of the ranks' own time
GRACE_S = 3.0  # how long the other ranks may go on after one has failed, to print what they have to say
TAIL_LINES = 30

SERVERS: list[ForkServer] = []
"""The one that runs, if one does."""

DEVICE = ["cpu"]
"""What ranks run on: cpu, simulated or cuda."""

GPUS = "GPUS_OF_TESTS"  # what CUDA_VISIBLE_DEVICES is for ranks; the process of the tests itself stays on the CPU


def run_ranks(
    n: int,
    worker: Callable[..., Any] | str,
    *args: Any,
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
    process_group: bool = True,
) -> list[Any]:
    """Call `worker(*args)` on `n` ranks and return the results in rank order; a failing rank fails the test.

    `worker` is a function or "module:function"; `env` is laid over the ranks' environment.
    """
    name = worker if isinstance(worker, str) else f"{worker.__module__}:{worker.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        job = Path(folder)
        code = _launch(name, job, n, args, timeout_s, env or {}, process_group)
        if code != 0:
            pytest.fail(_report(name, n, job, code), pytrace=False)
        return [pickle.loads((job / f"rank_{rank}.result").read_bytes()) for rank in range(n)]


def here() -> Any:
    """Return the device of this rank, on which tensors lie that ranks exchange."""
    import torch

    if kind() == "cuda":
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) if torch.cuda.device_count() > 1 else 0)
    return torch.device(f"{simulated.NAME}:{os.environ['LOCAL_RANK']}" if kind() == "simulated" else "cpu")


def kind() -> str:
    """Return what this rank runs on: cpu, simulated or cuda."""
    on_gpus = GPUS in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES")  # the latter alone may be the user's
    return "simulated" if simulated.is_installed() else "cuda" if on_gpus else "cpu"


def on_device(worker: Callable[..., Any]) -> Callable[..., Any]:
    """Have a worker make its tensors, which name no device, on the device of its rank."""

    @functools.wraps(worker)
    def run(*args: Any) -> Any:
        with nullcontext() if kind() == "cpu" else here():
            return worker(*args)

    return run


def inheriting(make: Callable[..., object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have `make`, which keeps what it makes, called once before a worker's ranks are forked, which then have it too.

    It is given the arguments of the worker.

    Not on the simulated device, where each rank makes it on its own.
    """

    def mark(worker: Callable[..., Any]) -> Callable[..., Any]:
        worker.inherited = make  # type: ignore[attr-defined]
        return worker

    return mark


def words_of_failing_ranks(n: int, worker: Callable[..., Any], *args: Any, timeout_s: float = 60) -> str:
    """Call `worker(*args)` on `n` ranks, one of which has to fail; return what all of them printed."""
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        job, name = Path(folder), f"{worker.__module__}:{worker.__qualname__}"
        code = _launch(name, job, n, args, timeout_s)
        assert code, _report(name, n, job, code)
        return "".join((job / f"rank_{rank}.log").read_text(errors="replace") for rank in range(n))


def script_on_ranks(
    n: int, script: str | Path, *words: object, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a Python script with arguments on `n` ranks that need not import; return what they printed together."""
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        job, name = Path(folder), f"{__name__}:_run_script"
        code = _launch(name, job, n, (str(script), list(map(str, words)), job), timeout_s, process_group=False)
        assert code is not None, _report(name, n, job, code)
        said = [(job / stream).read_text() if (job / stream).exists() else "" for stream in ("stdout", "stderr")]
        return subprocess.CompletedProcess([str(script), *map(str, words)], code, *said)


def _run_script(script: str, words: list[str], job: Path) -> None:
    """Become a rank of a script, as a launcher starts it; a code other than 0 ends this process."""
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(job / stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        if end.code:
            os._exit(end.code if isinstance(end.code, int) else 1)


def _launch(
    name: str,
    job: Path,
    n: int,
    args: tuple[Any, ...],
    timeout_s: float,
    more: Mapping[str, str] | None = None,
    process_group: bool = True,
) -> int | None:
    environment = {**_environment(n, more or {}), "SIMULATED_DEVICE_FOLDER": str(job)}
    (job / "args").write_bytes(pickle.dumps((n, timeout_s, process_group, args)))
    return _server(environment).launch(name, job, environment, timeout_s + START_LIMIT_S)


def _server(environment: Mapping[str, str]) -> ForkServer:
    """The server for this environment: the last one, if it is for the same."""
    if not SERVERS or not SERVERS[-1].serves(environment):
        while SERVERS:
            SERVERS.pop().close()
        SERVERS.append(ForkServer(environment))
    return SERVERS[-1]


def _environment(n: int, extra: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        **device_environment(),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **extra,
    }


def device_environment() -> dict[str, str]:
    """Return what a process needs in its environment to run on the device of the tests, on a machine with a GPU too."""
    found = simulated.environment() if DEVICE[0] == "simulated" else {}  # the first build extends the path
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    if DEVICE[0] == "cpu":
        return {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    if DEVICE[0] == "cuda":
        devices = {"CUDA_VISIBLE_DEVICES": os.environ[GPUS], "DS_ACCELERATOR": "cuda"}
        return {**devices, **WITHOUT_DRIVER, "PYTHONPATH": path}
    return {"CUDA_VISIBLE_DEVICES": "", **found, "PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], path])}


def _report(name: str, n: int, job: Path, code: int | None) -> str:
    """Tell what each rank said last, the first failed rank on top."""
    first = job / "first_failed"
    order = sorted(range(n), key=lambda rank: not (first.exists() and first.read_text() == str(rank)))
    how = "ran out of time" if code is None else "failed"
    lines = [f"{name} {how} on {n} ranks", *_tail("launcher", job / "launcher.log")]
    for rank in order:
        lines += _tail(f"rank {rank}", job / f"rank_{rank}.log")
    return "\n".join(lines)


def _tail(who: str, log: Path) -> list[str]:
    said = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.exists() else []
    return [f"--- {who}: last lines ---" if said else f"--- {who}: silent ---", *said]


def launch_ranks(name: str, job: Path) -> int:
    """Fork the ranks and wait for them; after the first failure give the others a moment, then kill them."""
    module, _, function = name.partition(":")
    n, timeout_s, process_group, args = pickle.loads((job / "args").read_bytes())
    if process_group:
        import torch.distributed  # noqa: F401  imported before the fork, so once
    worker = getattr(importlib.import_module(module), function)
    if hasattr(worker, "inherited") and not simulated.is_installed():
        worker.inherited(*args)
    alive: dict[int, int] = {}
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, job, timeout_s, lambda: _call(worker, args, process_group))
        alive[pid] = rank
    deadline: float | None = None
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = alive.pop(pid)
            if status != 0 and deadline is None:
                deadline = time.monotonic() + GRACE_S
                (job / "first_failed").write_text(str(rank))
                print(f"rank {rank} was the first to fail, status {os.waitstatus_to_exitcode(status)}")
        elif deadline is not None and time.monotonic() > deadline:
            for other in alive:
                os.kill(other, signal.SIGKILL)
            break
        else:
            time.sleep(0.01)
    return 0 if deadline is None else 1


def _be_rank(rank: int, job: Path, timeout_s: float, call: Callable[[], Any]) -> None:
    """Become rank `rank` in a forked child: own log, own environment, never return."""
    code = 1
    try:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        if kind() == "cuda":
            _take_gpu(rank)
        log = os.open(job / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)
        (job / f"rank_{rank}.result").write_bytes(pickle.dumps(call()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take_gpu(rank: int) -> None:
    """Have ranks share the GPUs if there are fewer. NCCL refuses two ranks of a host on one GPU: let each be a host."""
    devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    if int(os.environ["WORLD_SIZE"]) > len(devices):
        own = {"CUDA_VISIBLE_DEVICES": devices[rank % len(devices)], "NCCL_HOSTID": f"rank {rank}"}
        os.environ.update(own, NCCL_SOCKET_IFNAME="lo")


def _call(worker: Callable[..., Any], args: tuple[Any, ...], process_group: bool) -> Any:
    if not process_group:
        return worker(*args)
    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_map_only

    if kind() != "cpu":
        torch.accelerator.set_device_index(here().index)
    dist.init_process_group({"cpu": "gloo", "simulated": simulated.BACKEND, "cuda": "nccl"}[kind()])
    result = tree_map_only(torch.Tensor, torch.Tensor.cpu, worker(*args))  # the test's process may lack the device
    dist.barrier()  # no rank tears its sockets down while another still computes
    dist.destroy_process_group()
    return result
