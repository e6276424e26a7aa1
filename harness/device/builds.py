"""Stop the compilation of operators that DeepSpeed starts on demand. Imports no torch."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from harness.topology.processes import children_of, command_of


def abandon_builds() -> None:
    """Stop a compilation of DeepSpeed's operators in this process, and remove torch's lock on its folder.

    Torch removes its lock file only when Python exits normally. Otherwise the next run would wait for it forever.
    """
    for child in children_of(os.getpid()):
        if any(Path(word).name == "ninja" for word in command_of(child)[:2]):
            with suppress(OSError):  # it has ended by itself
                folder = Path(f"/proc/{child}/cwd").readlink()  # torch starts it in the folder that it has locked
                os.kill(child, signal.SIGTERM)  # ninja ends its compilers, and removes their partial output
                (folder / "lock").unlink(missing_ok=True)
