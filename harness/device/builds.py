"""Stop the compilation of operators that DeepSpeed starts on demand. Imports no torch."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from harness.topology.processes import children_of, command_of


def abandon_builds() -> None:
    """Stop a compilation of DeepSpeed's operators in this process, and remove torch's lock on its folder."""
    for child in children_of(os.getpid()):
        if any(Path(word).name == "ninja" for word in command_of(child)[:2]):
            # It may have ended by itself.
            with suppress(OSError):
                # torch starts it in the folder that it has locked.
                folder = Path(f"/proc/{child}/cwd").readlink()
                # ninja ends its compilers, and removes their partial output.
                os.kill(child, signal.SIGTERM)
                # torch removes it only when Python exits normally. Otherwise the next run would wait for it forever.
                (folder / "lock").unlink(missing_ok=True)
