"""Show an error that ends the run: on one rank, if all have it; if it is a UserError as one line, in any script."""

from __future__ import annotations

import atexit
import os
import re
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

_ASKED = re.compile(r"allocate ([\d.,]+) (\w+)")  # as torch's allocators and numpy say it
_LESS_MEMORY = (
    "use a smaller --per_device_train_batch_size with a larger --gradient_accumulation_steps (same results), "
    "pipeline.activation_checkpoint_interval 1 or a smaller --block_size, or more ranks with a higher ZeRO stage or "
    "with more pipeline stages"
)
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


def out_of_memory(error: BaseException, step: int = 0) -> str | None:
    """Return a line on an allocation that failed, on the device or the host, with what to do; None for another error.

    `step` is the current step; 0 before the first, or if it is unknown. torch's allocator on a CPU raises RuntimeError,
    which its text alone tells from others.
    """
    text = str(error)
    on_device = "out of memory" in text.lower() and not isinstance(error, MemoryError)
    if not (on_device or isinstance(error, MemoryError) or "can't allocate memory" in text):
        return None
    asked = _ASKED.search(text)
    when = f" in step {step}" if step else ""
    when += f" ({_size(*asked.groups())} could not be allocated)" if asked else ""
    if on_device:
        return f"out of its device's memory{when}: {_LESS_MEMORY}"
    return f"out of its host's memory{when}: {_LESS_MEMORY}, or put fewer ranks on a host"


def _size(number: str, unit: str) -> str:
    """Return a size as a message gives it, bytes in MiB or GiB."""
    if unit != "bytes":
        return f"{number} {unit}"
    size = int(number) / 2**20
    return f"{size:,.0f} MiB" if size < 1024 else f"{size / 1024:,.1f} GiB"


def show_in_one_line() -> None:
    """Print a UserError that ends this program as one line, with the line of the program that it comes from.

    A `sys.excepthook` that the program itself has set stays. Other errors are shown as usual, and then what to do if
    memory was exhausted; ranks that wait for this one are told.
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
        if (memory := out_of_memory(error)) is not None:
            plain_console(env.rank).fail(f"rank {env.rank}: {memory}")
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
