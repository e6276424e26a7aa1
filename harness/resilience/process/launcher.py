"""Find this rank's launcher: whether it is still running, and the command that the user typed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.topology.processes import DEEPSPEED_LAUNCH, above, command_of, parent_of

RUNNERS = ("deepspeed", "ds", "deepspeed.launcher.runner")  # names of the command that the user starts
WRAPPER = "ds-harness"
WRAPPERS = ((WRAPPER, "launch"), (WRAPPER, "train"))  # commands that start ranks
STARTED = "--started"  # the flag of a launch that another launch, on another host, has started


@dataclass(frozen=True)
class Launcher:
    """The chain of processes that started this one."""

    # (process, parent) from this process upwards. Empty without a launcher: closing the shell then ends nothing.
    links: tuple[tuple[int, int], ...] = ()
    command: tuple[str, ...] | None = None  # what the user typed; None if unknown
    runner: int = 0  # process of the `deepspeed` command on this host, or 0
    is_deepspeed: bool = False  # whether DeepSpeed's launcher started this process

    @classmethod
    def find(cls, parent: str = "") -> Launcher:
        """Find the launcher of this process, if one started it; `parent` is `LaunchEnv.parent`."""
        links = []
        process = os.getpid()
        for upper, command in above():
            links.append((process, upper))
            if DEEPSPEED_LAUNCH in command:
                return cls._deepspeed(links, upper)
            process = upper
        if parent:
            command = command_of(os.getppid()) if parent == "torchrun" else ()
            # The outermost one, which the user typed: it may have started one of these on each host.
            if parent == WRAPPER:
                launches = [words for _, words in above() if _is_wrapper(words)]
                command = launches[-1] if launches and STARTED not in launches[-1] else ()
            return cls(links=((os.getpid(), os.getppid()),), command=command or None)
        return cls(command=tuple(sys.orig_argv))

    @classmethod
    def _deepspeed(cls, links: list[tuple[int, int]], launch: int) -> Launcher:
        runner = parent_of(launch)
        command = command_of(runner)
        # Started by ssh, or by hand.
        if not any(Path(word).name in RUNNERS for word in command[:3]):
            return cls(links=tuple(links), is_deepspeed=True)
        return cls(links=(*links, (launch, runner)), command=command, runner=runner, is_deepspeed=True)

    def is_gone(self) -> bool:
        """Return whether a process of the launch above this one has exited."""
        try:
            return any(parent_of(process) != parent for process, parent in self.links)
        # Unknown for now: no file can be opened, for instance.
        except OSError:
            return False

    def end_runner(self) -> None:
        """End the `deepspeed` command by SIGTERM; its exit code is then 143."""
        # It gets Ctrl-C as well, and would print a traceback a quarter of a second later. Only while it is still the
        # parent: its number may belong to another process by now.
        if any(parent == self.runner == parent_of(process) for process, parent in self.links):
            os.kill(self.runner, signal.SIGTERM)


def _is_wrapper(words: Sequence[str]) -> bool:
    """Return whether a command line is that of `ds-harness launch` or `train`."""
    pairs = zip((Path(word).name for word in words[:3]), words[1:4], strict=False)
    return any(pair in WRAPPERS for pair in pairs)
