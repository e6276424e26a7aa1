"""What a rank prints for the user, and where all other output goes.

Rank 0 prints status to stdout; any rank prints an error to stderr, as one line. Each line also goes to the logger of
the module that prints it (`harness.training.trainer`), where a program can collect it. Under `quiet` everything else
that a process prints (DeepSpeed, torch, compilers, C++ code) goes to a log file of its rank.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import select
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from harness.config.values.secrets import Secrets
from harness.errors import UserError, reason

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Console:
    """Prints status (rank 0, stdout) and errors (any rank, stderr).

    Attributes:
        out: stream for status lines.
        error: stream for errors.
        speaks: whether this rank prints status lines.
        log: file that the other output of this rank goes to, if any.
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
        """Whether stdout is a terminal, so that a progress bar can be redrawn.

        False for a terminal of unknown width (`docker exec -t`), where bars would be empty.
        """
        if not self.out.isatty():
            return False
        with suppress(OSError):
            return os.get_terminal_size(self.out.fileno()).columns > 0
        return True


def warn(text: str) -> None:
    """Warn as Python does, for code that has no console; the warning also goes to the logger of the calling module."""
    warnings.warn(text, stacklevel=2)
    _log_once(_logger(), Secrets.known().masked(text))


@cache
def _log_once(logger: logging.Logger, text: str) -> None:
    """Log a warning; Python, too, tells one only once."""
    logger.warning("%s", text)


def _logger() -> logging.Logger:
    """Return the logger of the module that prints, as `harness.training.trainer`."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"] == __name__:
        frame = frame.f_back
    name = PACKAGE.name if frame is None else str(frame.f_globals["__name__"])
    return logging.getLogger(name if name.startswith(f"{PACKAGE.name}.") else PACKAGE.name)


def print_if_heard(text: str, stream: TextIO) -> None:
    """Print a line, or drop it if that fails. After a broken pipe all later output of this stream is dropped."""
    with suppress(OSError):
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:
            _discard(stream.fileno())


def drop_output_without_reader() -> None:
    """Point stdout and stderr to /dev/null if their reader has gone, for this process and those it starts."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            _discard(descriptor)


def _discard(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def plain_console(rank: int) -> Console:
    """Return a console on this process's own stdout and stderr."""
    return Console(out=sys.stdout, error=sys.stderr, speaks=rank == 0)


@contextmanager
def quiet(log: Path, rank: int) -> Iterator[Console]:
    """Redirect stdout and stderr of this process to `log`; yield the console that still reaches the user.

    Warnings of this package are still shown on rank 0. Output that a full disk does not take is lost.

    Raises:
        UserError: the log file cannot be created.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and not log.is_file():  # a pipe would be waited for
            raise UserError(f"{log}: it is not a file: move it elsewhere")
        log_file = _LossyFile(log, "a")
    except OSError as problem:
        raise UserError(f"{log}: cannot be written: {reason(problem)}") from problem
    with _duplicate(sys.stdout) as out, _duplicate(sys.stderr) as error, _lines_to(log_file) as file:
        console = Console(out=out, error=error, speaks=rank == 0, log=log)
        saved = os.dup(1), os.dup(2)
        show = warnings.showwarning
        warnings.showwarning = _show_ours(console, show)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            with redirect_stdout(file), redirect_stderr(file):  # where Python's streams are not descriptors 1 and 2
                yield console
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # into the log, on a full disk
                    stream.flush()
            warnings.showwarning = show
            for number, duplicate in zip((1, 2), saved, strict=True):
                os.dup2(duplicate, number)
                os.close(duplicate)


def _duplicate(stream: TextIO) -> TextIO:
    stream.flush()
    return _lines_to(_LossyFile(os.dup(stream.fileno()), "w"))


def _lines_to(file: _LossyFile) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="replace", line_buffering=True)


class _LossyFile(io.FileIO):
    """A file that ignores failed writes: a run goes on after its terminal or pipe was closed, or its disk is full."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _show_ours(console: Console, show: Callable[..., None]) -> Callable[..., None]:
    shown: set[str] = set()  # one may be given twice: by the script and by the Trainer

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if Path(filename).resolve().is_relative_to(PACKAGE) or "harness" in Path(filename).parts:
            if console.speaks and str(message) not in shown:  # `warn` has logged it
                print_if_heard(f"warning: {Secrets.known().masked(str(message))}", console.out)
            shown.add(str(message))
        show(message, category, filename, lineno, file, line)

    return show_warning
