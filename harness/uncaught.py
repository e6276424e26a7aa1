"""Print an uncaught UserError as one line, on one rank, also in a user's own script."""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import TracebackType

from harness.config.text.diagnostic import ConfigError
from harness.console import plain_console
from harness.errors import UserError, UserErrors
from harness.topology.env import LaunchEnv

GRACE_S = 6.0  # longer than the launcher takes to see that a rank has ended and to stop the others


def lines_of(error: UserError) -> list[str]:
    """Return one line per error; of several config findings only the first, with the number of others."""
    if isinstance(error, UserErrors):
        return str(error).splitlines()
    if not isinstance(error, ConfigError):
        return [str(error)]
    first, *rest = error.diagnostics
    more = f" (and {len(rest)} more: ds-harness check {first.file})" if rest else ""
    return [f"{first}{more}"]


def show_in_one_line() -> None:
    """Print a UserError that ends this program as one line, with the line of the program that it comes from.

    A `sys.excepthook` that the program itself has set stays; other errors are shown as usual.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, UserError):
        sys.__excepthook__(kind, error, trace)
        return
    try:
        rank = LaunchEnv.from_environ(os.environ).rank
    except UserError:
        rank = 0
    if rank > 0:  # usually every rank finds the same: rank 0 reports it, and the launcher ends the others
        time.sleep(GRACE_S)
    sys.stdout.flush()
    for line in lines_of(error):
        plain_console(rank).fail(f"{line}{_place(trace)}")


def _place(trace: TracebackType | None) -> str:
    """Return the last line of the program outside of this package."""
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        # by module, as the constructor of a dataclass belongs to no file
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in {"harness", *sys.stdlib_module_names}:
            return f" ({frame.f_code.co_filename}:{line})"
    return ""
