"""Show an error that ends the run: on one rank, if all have it; if it is a UserError as one line, in any script."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from harness.config.text.diagnostic import ConfigError
from harness.console import plain_console
from harness.errors import NotMet, UserError, UserErrors
from harness.topology.env import LaunchEnv
from harness.topology.failure import show_and_tell, tell

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

    A `sys.excepthook` that the program itself has set stays. Other errors are shown as usual; ranks that wait for this
    one are told.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def report(env: LaunchEnv, error: BaseException, show: Callable[[], None]) -> None:
    """Show why this rank fails, unless rank 0 shows the same error, and tell the ranks that wait for this one."""
    atexit.unregister(tell)  # `telling_of_a_failure` would tell it again
    if is_awaited(env, error):
        show_and_tell(env, first_line(error), show)
    elif env.rank == 0:
        show()
    elif env.ends_together or not isinstance(error, NotMet):  # NotMet: rank 0 has it too, or has caused it
        time.sleep(GRACE_S)  # usually every rank finds the same: rank 0 reports it, and the launcher ends the others
        show()


def is_awaited(env: LaunchEnv, error: BaseException) -> bool:
    """Return whether the other ranks, which do not know of an error of this one, will wait for it to meet them."""
    if env.ends_together or isinstance(error, KeyboardInterrupt | NotMet):
        return False
    distributed = sys.modules.get("torch.distributed")
    return distributed is None or not distributed.is_initialized()


def first_line(error: BaseException) -> str:
    """Return the first line of an error, after the name of its kind unless it is the user's."""
    if isinstance(error, SystemExit):
        return f"exit code {error.code}"
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        env = LaunchEnv.from_environ(os.environ)
    except UserError:
        env = LaunchEnv()
    if not isinstance(error, UserError):
        sys.__excepthook__(kind, error, trace)
        if is_awaited(env, error):  # also before this program has made a Trainer
            atexit.unregister(tell)
            tell(env, first_line(error))
        return
    sys.stdout.flush()

    def show() -> None:
        for line in lines_of(error):
            plain_console(env.rank).fail(f"{line}{_place(trace)}")

    report(env, error, show)


def _place(trace: TracebackType | None) -> str:
    """Return the last line of the program outside of this package."""
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        # by module, as the constructor of a dataclass belongs to no file
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in {"harness", *sys.stdlib_module_names}:
            return f" ({frame.f_code.co_filename}:{line})"
    return ""
