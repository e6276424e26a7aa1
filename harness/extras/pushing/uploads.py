"""Copy folders to a second place in a thread of their own, one after the other, with retries."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.extras.pushing.store import CANNOT, Store, why

WAITS_S = (1.0, 5.0, 25.0, 125.0)
"""How long to wait after each failed try; after the last one a copy is given up."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Files to copy.

    Attributes:
        name: the folder's name in the second place; "" for the store itself.
        folder: where the files lie here; deleted after the copy.
        files: their paths in it; the last one marks the copy as complete.
    """

    name: str
    folder: Path
    files: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a copy: `problem` is None if it is complete."""

    name: str
    nbytes: int = 0
    seconds: float = 0.0
    problem: str | None = None


class Uploads:
    """Copies what is added in the background. If a newer folder waits already, an older one that waits is left out."""

    def __init__(self, store: Store, waits: Sequence[float] = WAITS_S) -> None:
        self._store = store
        self._waits = waits
        self._changed = threading.Condition()
        self._waiting: Upload | None = None
        self._is_busy = False
        self._outcomes: list[Outcome] = []
        # A daemon: a store that never answers does not keep the process alive.
        threading.Thread(target=self._run, name="push", daemon=True).start()

    def add(self, upload: Upload) -> None:
        """Queue a copy; does not wait."""
        with self._changed:
            if (left_out := self._waiting) is not None:
                shutil.rmtree(left_out.folder, ignore_errors=True)
                self._outcomes.append(Outcome(name=left_out.name, problem=f"{upload.name} was there before its turn"))
            self._waiting = upload
            self._changed.notify_all()

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait until everything is copied or given up, or the time has passed; return whether everything is."""
        until = time.monotonic() + seconds
        with self._changed:
            while (is_busy := self._waiting is not None or self._is_busy) and time.monotonic() < until:
                self._changed.wait(0.2)  # in pieces, so that a signal is handled
        return not is_busy

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being copied."""
        with self._changed:
            return self._waiting is None and not self._is_busy

    def outcomes(self) -> list[Outcome]:
        """Return what has been done since the last call."""
        with self._changed:
            done = self._outcomes
            self._outcomes = []
            return done

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None:
                    self._changed.wait()
                upload = self._waiting
                self._waiting = None
                self._is_busy = True
            outcome = self.copied(upload)
            shutil.rmtree(upload.folder, ignore_errors=True)
            with self._changed:
                self._outcomes.append(outcome)
                self._is_busy = False
                self._changed.notify_all()

    def copied(self, upload: Upload) -> Outcome:
        """Copy a folder now, with retries; return what became of it."""
        begun = time.monotonic()
        problem = ""
        for wait in (*self._waits, None):
            try:
                self._store.put(upload.folder, upload.files, upload.name)
                nbytes = sum((upload.folder / name).stat().st_size for name in upload.files)
                return Outcome(name=upload.name, nbytes=nbytes, seconds=time.monotonic() - begun)
            except CANNOT as error:  # whatever the client of a store raises, training goes on
                problem = why(error)
            if wait is not None:
                time.sleep(wait)
        return Outcome(name=upload.name, seconds=time.monotonic() - begun, problem=problem)
