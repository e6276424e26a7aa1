"""A process that has imported what runs on ranks, and forks a launcher from itself for each test that asks for one.

So the suite imports torch, deepspeed and transformers once for all launches. What a launcher imports or changes is its
own: it is forked from a process in which nothing has run yet. Modules read the environment when they are imported, so
a server serves launches with its own environment alone, but for what `OF_A_LAUNCH` names.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.installed import is_installed

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = (
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "datasets",  # its cache is where the environment of the server has it, as that of the hub
    "harness.composition",
    "tests.support.training",
)
OF_A_LAUNCH = {
    "RANK",  # this and the next are those of each rank; a Trainer in the process of the tests has left its own
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_PORT",
    "PYTEST_CURRENT_TEST",
    "SIMULATED_DEVICE_FOLDER",
    "XDG_CACHE_HOME",
}


class ForkServer:
    """The server as a test sees it. Its launchers are process groups of their own, their ranks included."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = _lasting(environment)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forkserver"],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # an answer that was read ahead would be waited for
            start_new_session=True,
        )
        atexit.register(self.close)

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a launch with this environment may come from here."""
        return self._process.poll() is None and self.environment == _lasting(environment)

    def launch(self, worker: str, folder: Path, environment: Mapping[str, str], timeout_s: float) -> int | None:
        """Let a launcher run `worker`, and end it with its ranks; return its exit code, None if the time ran out."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"worker": worker, "folder": str(folder), "environment": dict(environment)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        launcher = int(self._process.stdout.readline() or 0)
        if not launcher:
            return self._process.wait()  # the server itself has failed; it has said why
        try:
            ended = bool(select.select([self._process.stdout], [], [], timeout_s)[0])
        finally:
            _kill_group(launcher)
            code = int(self._process.stdout.readline())
        return code if ended else None

    def close(self) -> None:
        """Let the server end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        atexit.unregister(self.close)


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OF_A_LAUNCH}


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def serve(launch: Callable[[str, Path], int]) -> None:
    """Fork a launcher for each line of the input; answer with its process id, then with its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    trials = ["harness.verify.trials.preload"] if is_installed("harness.verify") else []
    for module in (*trials, *PRELOADED):
        importlib.import_module(module)
    gc.freeze()  # else each collection of garbage looks through all that is imported, for half a second
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.flush()
        launcher = os.fork()
        if launcher == 0:
            _be_launcher(lambda request=request: launch(request["worker"], Path(request["folder"])), request)
        print(launcher, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]), file=answers, flush=True)


def _be_launcher(launch: Callable[[], int], request: Mapping[str, object]) -> None:
    """Become the launcher in a forked child: own process group, log and environment; never return."""
    code = 1
    try:
        os.setsid()
        log = os.open(f"{request['folder']}/launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        code = launch()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from tests.support.ranks import launch_ranks

    serve(launch_ranks)
