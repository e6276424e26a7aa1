"""A standby process: it does the imports of a rank in advance, and then forks all ranks of its host.

An agent keeps one for the next attempt, so that a restart does not wait for imports. The standby reads one line, forks
a rank for each command in it, writes their pids and exits. The agent, a subreaper, becomes the ranks' parent.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.resilience.on_host.messages import LineReader, Order, Preparation
from harness.resilience.on_host.processes import die_with_parent, end_with_parent
from harness.topology.env import RECORDS, inherited, replace_environment
from harness.topology.processes import present_as

# Count devices through NVML: a CUDA context in this process would not work in its forks.
WITHOUT_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
TITLE = "ds-harness: ready for a restart"  # its command line in ps
# Bytes reserved in argv and environ, which a rank overwrites in place with its own: others read them in /proc.
ROOM = 1 << 12
PADDING = "DS_HARNESS_ROOM"


class Standby:
    """The standby process, from its agent's side."""

    def __init__(self, wanted: Preparation) -> None:
        self._wanted = wanted
        self._out = os.dup(1) if wanted.out is None else wanted.out
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", __name__, *wanted.modules, " " * ROOM],
            cwd=wanted.folder,
            env={**inherited(), **wanted.environment, **WITHOUT_DRIVER, RECORDS: wanted.records, PADDING: " " * ROOM},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_parent,
            pass_fds=(self._out,),
        )
        assert self.process.stdout is not None
        self._answers = LineReader(self.process.stdout.fileno())

    def start(self, order: Order) -> bool:
        """Turn it into the ranks of an order; return False if it has exited or was prepared for another one."""
        mine = (self._wanted.records, self._wanted.folder, self._wanted.environment)
        if self.process.poll() is not None or mine != (order.records, order.folder, order.environment):
            return False
        request = {"agent": os.getpid(), "out": self._out, "ranks": order.ranks}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.close()
        except BrokenPipeError:
            return False
        return True

    def started(self) -> list[tuple[int, int]]:
        """Return (rank, process) of the ranks that were forked since the last call."""
        return [(rank, process) for rank, process in map(json.loads, self._answers.read())]

    def has_ended(self) -> bool:
        """Whether it forks no further ranks than those that `started` returns now."""
        return self._answers.is_closed or self.process.poll() is not None

    def end(self) -> None:
        """Kill it, stopped or not."""
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Import, then fork the ranks that the agent asks for. In a rank, return when its script has ended."""
    present_as([TITLE])
    environment, answers = {name: value for name, value in inherited().items() if name != PADDING}, os.dup(1)
    os.dup2(2, 1)  # output of imports must not mix with the answers
    for module in sys.argv[1:-1]:
        importlib.import_module(module)
    gc.freeze()  # else each garbage collection of a rank walks all imported objects and copies their pages
    if not (line := sys.stdin.readline()):
        return
    request, standby = json.loads(line), os.getpid()
    for rank, command, own in request["ranks"]:
        if (process := os.fork()) == 0:
            os.close(answers)
            _leave(standby)
            _become_rank(command, {**own, **environment, **own}, request["out"], request["agent"])
            return
        os.write(answers, f"{json.dumps([rank, process])}\n".encode())


def _leave(standby: int) -> None:
    """Start a session of its own, and wait until the standby has exited: the agent is the parent then."""
    os.setsid()
    while os.getppid() == standby:
        time.sleep(0.001)


def _become_rank(command: Sequence[str], environment: dict[str, str], out: int, agent: int) -> None:
    """Run a Python command in this process as if the agent had started it. Does nothing if the agent is gone."""
    end_with_parent()
    if os.getppid() != agent:
        return
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1)):
        os.dup2(source, target)
        os.close(source)
    replace_environment(environment)
    if _has_driver():
        os.execve(command[0], list(command), environment)
    present_as(command, environment)  # ranks find each other by environment and command line in /proc
    words = [word for word in command[1:] if word != "-u"]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


def _has_driver() -> bool:
    """Whether the imports have initialised CUDA, which does not work in a fork."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()  # noqa: SLF001


if __name__ == "__main__":
    main()
