"""The compilation of DeepSpeed's operators, where a process ends in the middle of it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from harness.topology.processes import children_of, command_of


def abandon_builds() -> None:
    """Stop the compilation that this process has started, and release its lock.

    Torch keeps other processes out by a file, which it removes only where Python ends as usual: the next run would
    wait for it for ever.
    """
    for child in children_of(os.getpid()):
        if any(Path(word).name == "ninja" for word in command_of(child)[:2]):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)  # it ends its compilers, and removes what they have started to write
    lock = getattr(sys.modules.get("torch.utils.file_baton"), "FileBaton", None)
    for held in [thing for thing in gc.get_objects() if type(thing) is lock] if lock else []:
        with suppress(OSError, TypeError):  # not acquired, or released already
            if os.path.samestat(os.fstat(held.fd), Path(held.lock_file_path).stat()):
                held.release()
