"""The launcher of this rank: whether it is still running, and the command that the user typed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.arguments.words import with_resume
from harness.topology.processes import DEEPSPEED_LAUNCH, above, command_of, parent_of, wakes_of

RUNNERS = ("deepspeed", "ds", "deepspeed.launcher.runner")  # names of the command that the user starts
WRAPPER = ("ds-harness", "launch")  # may have started that command
STARTED = "--started"  # of a launch that another one has started, on another host
WAKES_EVERY_S = 0.06  # an interrupted `deepspeed` command sleeps at most 0.05 s at a time, for 0.25 s in all


@dataclass(frozen=True)
class Launcher:
    """The chain of processes that started this one.

    Attributes:
        links: (process, parent) pairs of the launch, from this process upwards. Empty without a launcher: such a
            process goes on when its shell is closed.
        command: what the user typed; None if unknown.
        runner: process of the `deepspeed` command on this host; 0 if there is none.
        is_deepspeed: whether DeepSpeed's launcher started this process.
    """

    links: tuple[tuple[int, int], ...] = ()
    command: tuple[str, ...] | None = None
    runner: int = 0
    is_deepspeed: bool = False

    @classmethod
    def find(cls, parent: str = "") -> Launcher:
        """Return the launcher of this process, if one started it; `parent` is `LaunchEnv.parent`."""
        links, process = [], os.getpid()
        for upper, command in above():
            links.append((process, upper))
            if DEEPSPEED_LAUNCH in command:
                return cls._deepspeed(links, upper)
            process = upper
        if parent:
            command = command_of(os.getppid()) if parent == "torchrun" else ()
            if parent == WRAPPER[0]:  # the outermost: one that starts others on each host stands above them
                command = next(reversed([words for _, words in above() if _is_wrapper(words)]), ())
                command = () if STARTED in command else command
            return cls(links=((os.getpid(), os.getppid()),), command=command or None)
        return cls(command=tuple(sys.orig_argv))

    @classmethod
    def _deepspeed(cls, links: list[tuple[int, int]], launch: int) -> Launcher:
        runner = parent_of(launch)
        command = command_of(runner)
        if not any(Path(word).name in RUNNERS for word in command[:3]):  # started by ssh, or by hand
            return cls(links=tuple(links), is_deepspeed=True)
        links = [*links, (launch, runner)]
        return cls(links=tuple(links), command=command, runner=runner, is_deepspeed=True)

    def is_gone(self) -> bool:
        """Whether a process of the launch above this one has exited."""
        try:
            return any(parent_of(process) != parent for process, parent in self.links)
        except OSError:  # unknown for now: no file can be opened, for instance
            return False

    def runner_wakes(self) -> int:
        """Return how often the `deepspeed` command has woken up: constant while it waits for its children."""
        return wakes_of(self.runner) if self.runner else 0

    def is_interrupted(self, wakes: int) -> bool:
        """Whether the `deepspeed` command got a SIGINT since `runner_wakes` was `wakes`.

        It then looks for a quarter of a second whether its child ends too, and prints a traceback. Returns False for
        a command that goes on after a stop, which wakes once.
        """
        now = self.runner_wakes()
        if now in (0, wakes):
            return False
        time.sleep(WAKES_EVERY_S)
        return self.runner_wakes() not in (0, now)

    def end_runner(self) -> None:
        """End the `deepspeed` command before it prints a traceback; its exit code is then 143.

        SIGINT cannot do it, as Python has a handler for it.
        """
        if any(parent == self.runner == parent_of(process) for process, parent in self.links):
            os.kill(self.runner, signal.SIGTERM)

    def resume_command(self) -> str | None:
        """Return the command by which the user goes on from the newest checkpoint."""
        return None if self.command is None else shlex.join(with_resume(_as_typed(self.command)))


def _is_wrapper(words: Sequence[str]) -> bool:
    """Whether a command line is that of `ds-harness launch`."""
    return WRAPPER in zip((Path(word).name for word in words[:3]), words[1:4], strict=False)


def _as_typed(words: Sequence[str]) -> list[str]:
    """Return a command line without the interpreter that runs a script of $PATH, and without that script's folder."""
    if len(words) > 1 and (name := Path(words[1]).name) and shutil.which(name) == words[1]:
        return [name, *words[2:]]
    return list(words)
