"""`ds-harness launch` with flags that only the `deepspeed` command can follow: that command, with the usual exit code.

The `deepspeed` command has no handler for Ctrl-C, and its child ends with 1 when it is signalled. So both get a process
group of their own, which a terminal does not signal, and signals go to the ranks, which know how to end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.errors import UserError
from harness.resilience.process.signals import SIGNALS
from harness.topology.processes import DEEPSPEED_LAUNCH, children_of, command_of


def run_deepspeed(argv: Sequence[str]) -> int:
    """Run `deepspeed` with these arguments; returns its exit code, or 128 + the number of the signal that ended it."""
    program = _program()
    received: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        _signal(process.pid, number)

    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]  # as under nohup
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until there is a process to pass them on to
    process = subprocess.Popen([program, *argv], process_group=0, preexec_fn=_unblock)
    for number in set(SIGNALS) - set(ignored):
        signal.signal(number, pass_on)
    _unblock()
    code = process.wait()
    if code and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _signal(runner: int, number: int) -> None:
    """Signal the ranks below a `deepspeed` command; before there are any, and on several hosts, end the command."""
    children = children_of(runner)
    launches = [child for child in children if DEEPSPEED_LAUNCH in command_of(child)]
    ranks = [rank for launch in launches for rank in children_of(launch)]
    if ranks:
        for rank in ranks:
            _send(rank, number)
    elif launches or not children:
        with suppress(ProcessLookupError):
            os.killpg(runner, signal.SIGTERM)
    else:
        _send(runner, signal.SIGTERM)  # pdsh: it ends what it has started on the hosts


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _program() -> str:
    """Return the `deepspeed` command of this Python's installation, else of $PATH."""
    beside = Path(sys.executable).with_name("deepspeed")
    found = str(beside) if beside.exists() else shutil.which("deepspeed")
    if found is None:
        raise UserError("no `deepspeed` command found: install deepspeed, or add its folder to PATH")
    return found
