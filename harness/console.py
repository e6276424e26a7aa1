"""Print status and errors for the user.

Rank 0 prints status lines to stdout; any rank prints errors to stderr, each as one line. Every line also goes to the
logger of the printing module (`harness.training.trainer`), where a program can collect it. Under `harness.quiet`, all
other output of a process (DeepSpeed, torch, compilers, C++ code) goes to a log file per rank.
"""

from __future__ import annotations

import inspect
import logging
import os
import select
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TextIO

from harness.config.values.secrets import Secrets

PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Console:
    """Prints status (rank 0, stdout) and errors (any rank, stderr).

    Attributes:
        out: stream for status lines.
        error: stream for errors.
        speaks: whether this rank prints status lines.
        log: file for this rank's other output, if any.
    """

    out: TextIO
    error: TextIO
    speaks: bool
    log: Path | None = None

    def say(self, text: str = "") -> None:
        """Print a line, on rank 0."""
        self._print(logging.INFO, text)

    def warn(self, text: str) -> None:
        """Print a warning, on rank 0."""
        self._print(logging.WARNING, text, "warning: ")

    def _print(self, level: int, text: str, prefix: str = "") -> None:
        if self.speaks:
            text = Secrets.known().masked(text)
            print_if_heard(prefix + text, self.out)
            _logger().log(level, "%s", text)

    def fail(self, text: str) -> None:
        """Print an error, on any rank, as one line."""
        line = " ".join(Secrets.known().masked(text).split())
        print_if_heard(f"error: {line}", self.error)
        _logger().error("%s", line)

    @property
    def is_terminal(self) -> bool:
        """Whether stdout is a terminal, so that a progress bar can be redrawn."""
        if not self.out.isatty():
            return False
        # In a terminal of unknown width (`docker exec -t`) bars would be empty.
        with suppress(OSError):
            return os.get_terminal_size(self.out.fileno()).columns > 0
        return True


def warn(text: str) -> None:
    """Issue a Python warning, for code without a console; it also goes to the logger of the calling module."""
    warnings.warn(text, stacklevel=2)
    _log_once(_logger(), Secrets.known().masked(text))


@cache
def _log_once(logger: logging.Logger, text: str) -> None:
    # Cached, because Python shows a warning only once too.
    logger.warning("%s", text)


def _logger() -> logging.Logger:
    """Return the logger of the printing module, such as `harness.training.trainer`."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"] == __name__:
        frame = frame.f_back
    name = PACKAGE.name if frame is None else str(frame.f_globals["__name__"])
    return logging.getLogger(name if name.startswith(f"{PACKAGE.name}.") else PACKAGE.name)


def print_if_heard(text: str, stream: TextIO) -> None:
    """Print a line, or drop it if that fails. After a broken pipe, all later output of the stream is dropped."""
    with suppress(OSError):
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:
            _discard(stream.fileno())


def drop_output_without_reader() -> None:
    """Redirect stdout and stderr to /dev/null if their reader is gone, for this process and its children."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            _discard(descriptor)


def _discard(descriptor: int) -> None:
    # Not closed: the next file would get its number, and Python's flush at exit would write into it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def plain_console(rank: int) -> Console:
    """Return a console on this process's stdout and stderr."""
    return Console(out=sys.stdout, error=sys.stderr, speaks=rank == 0)
