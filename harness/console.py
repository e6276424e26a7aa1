"""Who speaks, and where the chatter goes.

Rank 0 speaks to the user on standard output; an error is one line on standard error. Each line also goes to the logger
`harness`, where a program can collect it. Under `quiet` everything else
that a process prints (DeepSpeed's, torch's and the compiler's words, from C++ too) goes to a file of its rank.
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from harness.config.values.secrets import Secrets
from harness.errors import UserError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PACKAGE = Path(__file__).resolve().parent
LOGGER = logging.getLogger("harness")


@dataclass(frozen=True)
class Console:
    """The way to the user.

    Attributes:
        out: where rank 0 speaks.
        error: where an error goes.
        speaks: whether this rank speaks at all.
        log: this rank's log file, if its chatter was sent there.
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
            LOGGER.log(level, "%s", text)

    def fail(self, text: str) -> None:
        """Print an error, on any rank, as one line."""
        line = " ".join(Secrets.known().masked(text).split())
        print_if_heard(f"error: {line}", self.error)
        LOGGER.error("%s", line)

    @property
    def is_terminal(self) -> bool:
        """Whether the user sees a terminal, where a line can be redrawn.

        One that does not say how wide it is, as in `docker exec -t`, would show empty bars.
        """
        if not self.out.isatty():
            return False
        with suppress(OSError):
            return os.get_terminal_size(self.out.fileno()).columns > 0
        return True


def print_if_heard(text: str, stream: TextIO) -> None:
    """Print a line; if that fails it is lost, and where the reader is gone all further ones are, too."""
    with suppress(OSError):
        try:
            print(text, file=stream, flush=True)
        except BrokenPipeError:
            _let_go(stream.fileno())


def let_go_of_readers_that_are_gone() -> None:
    """Send standard output and error nowhere where nobody reads them any more, for this process and those it starts."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            _let_go(descriptor)


def _let_go(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def plain_console(rank: int) -> Console:
    """Return the console of a program that keeps its own output where it is."""
    return Console(out=sys.stdout, error=sys.stderr, speaks=rank == 0)


@contextmanager
def quiet(log: Path, rank: int) -> Iterator[Console]:
    """Send this process's standard output and error to `log`; yields the console that still reaches the user.

    Warnings that this package itself gives stay visible on rank 0. UserError if the log cannot be created; what does
    not fit on the disk later is lost.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        unheard = _Unheard(log, "a")
    except OSError as problem:
        raise UserError(f"{log}: cannot be written: {problem.strerror}") from problem
    with _duplicate(sys.stdout) as out, _duplicate(sys.stderr) as error, _lines_to(unheard) as file:
        console = Console(out=out, error=error, speaks=rank == 0, log=log)
        saved = os.dup(1), os.dup(2)
        show = warnings.showwarning
        warnings.showwarning = _show_ours(console, show)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            with redirect_stdout(file), redirect_stderr(file):  # where they are not file descriptors 1 and 2
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
    return _lines_to(_Unheard(os.dup(stream.fileno()), "w"))


def _lines_to(file: _Unheard) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="replace", line_buffering=True)


class _Unheard(io.FileIO):
    """A file whose reader may be gone, or its disk full: a run goes on although its terminal or its pipe was closed."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _show_ours(console: Console, show: Callable[..., None]) -> Callable[..., None]:
    shown: set[str] = set()  # by the script and by the Trainer, say

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if Path(filename).resolve().is_relative_to(PACKAGE) or "harness" in Path(filename).parts:
            if str(message) not in shown:
                console.warn(str(message))
            shown.add(str(message))
        show(message, category, filename, lineno, file, line)

    return show_warning
