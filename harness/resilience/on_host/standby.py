"""A process that has done the imports of a rank, and forks the ranks of its host, start after start.

So the ranks need not import torch, transformers and DeepSpeed themselves, neither at the first start nor at a restart.
For each start it forks a child; the child forks the ranks, writes their pids and exits. The agent, a subreaper, becomes
the ranks' parent and sees how they end.

multiprocessing's own fork server, with which torch's elastic agent can start functions, has three faults: when it is
stopped it blocks the agent for ever, a rank must return a value and cannot exit, and in /proc all ranks look alike.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import dropwhile
from pathlib import Path

from harness.console import drop_output_without_reader
from harness.resilience.on_host.processes import LineReader, present_as, signal_when_parent_dies
from harness.topology.env import RECORDS, inherited, replace_environment
from harness.topology.processes import own_python

WITHOUT_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # count devices by NVML: a CUDA context is lost in a fork
TITLE = "ds-harness: ready for a start"  # its command line in ps
ROOM = 1 << 12  # bytes in argv, which a rank overwrites with its own command line for ps
OF_PYTHON = ("-u", "-P")  # options of Python with which ranks start, and which this process has already
DONE = [-1, 0]  # follows the pids of a start
PRELOADED = (
    "torch.distributed",
    "transformers.generation",  # this and the next two: imported by every model
    "transformers.modeling_layers",
    "transformers.masking_utils",
    "deepspeed.runtime.zero.muon.original_muon",  # imports torch's compiler, as the first engine would
    "deepspeed.module_inject.auto_ep_layer",  # this and the next two: imported by the first engine
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "torch._subclasses.schema_check_mode",
    "harness.composition",
)


class Standby:
    """The process, from its agent's side. `root`: folder of the run's records, by which its processes are found."""

    def __init__(self, root: str, modules: Sequence[str] = PRELOADED) -> None:
        self._out = os.dup(1)
        self.process = subprocess.Popen(
            own_python("-u", "-m", __name__, *modules, " " * ROOM),
            env={**inherited(), **WITHOUT_DRIVER, RECORDS: root},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=partial(signal_when_parent_dies, signal.SIGKILL),  # stopped or not
            pass_fds=(self._out,),
        )
        assert self.process.stdout is not None
        self._answers = LineReader(self.process.stdout.fileno())

    def start(self, ranks: Sequence[tuple[int, list[str], dict[str, str]]]) -> bool:
        """Have it fork these ranks (number, command, environment); return False if it has exited."""
        request = {"agent": os.getpid(), "out": self._out, "ranks": ranks}
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            return self.process.poll() is None
        return False

    def started(self) -> list[tuple[int, int]]:
        """Return (rank, process) of the ranks forked since the last call; rank -1 follows the last of a start."""
        return [(rank, process) for rank, process in map(json.loads, self._answers.read())]

    def has_ended(self) -> bool:
        """Return whether it forks no ranks besides those that `started` returns now."""
        return self._answers.is_closed or self.process.poll() is not None

    def end(self) -> None:
        """Kill it, stopped or not."""
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            end.close()
        os.close(self._out)


def main() -> None:
    """Import, then fork the ranks of each start. In a rank, return when its script has ended."""
    present_as([TITLE])
    environment = inherited()
    answers = os.dup(1)
    with _silence():  # if an import fails, the ranks do it again, and report it
        for module in sys.argv[1:-1]:
            importlib.import_module(module)
    gc.freeze()  # else each garbage collection in a rank visits all imported objects and so copies their pages
    # Python 3.12 and newer warn of the idle threads of numpy's and torch's pools
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    while line := sys.stdin.readline():
        if (child := os.fork()) == 0:
            if _fork_ranks(json.loads(line), environment, answers):
                return
            os._exit(0)
        os.waitpid(child, 0)


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what this process prints in this block. Afterwards stdout is stderr: answers alone go to the agent."""
    errors = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for target in (1, 2):
        os.dup2(nowhere, target)
    yield
    for target in (1, 2):
        os.dup2(errors, target)
    os.close(errors)
    os.close(nowhere)


def _fork_ranks(request: dict[str, object], environment: dict[str, str], answers: int) -> bool:
    """Fork the ranks of a start. Returns True in a rank, when its script has ended, and False in the caller."""
    forker = os.getpid()
    out = request["out"]
    agent = request["agent"]
    assert isinstance(out, int) and isinstance(agent, int) and isinstance(request["ranks"], list)
    for rank, command, own in request["ranks"]:
        if (process := os.fork()) == 0:
            os.close(answers)
            os.setsid()
            while os.getppid() == forker:  # until it has exited, and the agent is the parent
                time.sleep(0.001)
            _become_rank(command, {**own, **environment, **own}, out, agent)
            return True
        os.write(answers, f"{json.dumps([rank, process])}\n".encode())
    os.write(answers, f"{json.dumps(DONE)}\n".encode())
    return False


def _become_rank(command: Sequence[str], environment: dict[str, str], out: int, agent: int) -> None:
    """Run a Python command in this process as if the agent had started it. Does nothing if the agent is gone."""
    signal_when_parent_dies(signal.SIGTERM)
    if os.getppid() != agent:
        return
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1)):
        os.dup2(source, target)
        os.close(source)
    drop_output_without_reader()
    replace_environment(environment)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():  # noqa: SLF001  # the imports have initialised CUDA
        os.execve(command[0], list(command), environment)
    present_as(command)
    words = list(dropwhile(lambda word: word in OF_PYTHON, command[1:]))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
