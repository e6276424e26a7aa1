"""Redirect what a process prints to a log file; only the console still reaches the user."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from harness.config.values.secrets import Secrets
from harness.console import PACKAGE, Console, print_if_heard
from harness.errors import UserError, reason

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
