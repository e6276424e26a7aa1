"""Stop the compilation of operators that DeepSpeed starts on demand. Imports no torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from harness.topology.processes import children_of, command_of


def abandon_builds() -> None:
    """Stop a compilation of DeepSpeed's operators in this process, and release torch's lock on it.

    Torch removes its lock file only when Python exits normally. Otherwise the next run would wait for it forever.
    """
    for child in children_of(os.getpid()):
        if any(Path(word).name == "ninja" for word in command_of(child)[:2]):
            with suppress(ProcessLookupError):
                # On SIGTERM, ninja ends its compilers and removes their partial output.
                os.kill(child, signal.SIGTERM)
    lock = getattr(sys.modules.get("torch.utils.file_baton"), "FileBaton", None)
    for held in [thing for thing in gc.get_objects() if type(thing) is lock] if lock else []:
        with suppress(OSError, TypeError):  # not acquired, or released already
            if os.path.samestat(os.fstat(held.fd), Path(held.lock_file_path).stat()):
                held.release()
