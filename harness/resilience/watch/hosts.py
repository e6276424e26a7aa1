"""What the ranks of other hosts show, by way of the store in which all ranks have met.

Of each host the rank that judges writes the host's rows and reads the others'. A connection of its own and a thread of
its own keep a slow network from everything else.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed as dist

from harness.resilience.watch.activity import Phase
from harness.resilience.watch.diagnosis import FRESH_S, Sight, Verdict

EVERY_S = 1.0
ANSWER_S = 5.0
PREFIX = "watch"


class OtherHosts:
    """The rows of other hosts, as they were last heard of.

    Args:
        store: that of the run; a connection of its own is made.
        here: number of this host; `count` is that of all.
        run: a name of the run, by which its rows are told from those of another one in the same store.
    """

    def __init__(self, store: dist.Store, here: int, count: int, run: str) -> None:
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        own.set_timeout(timedelta(seconds=ANSWER_S))
        self._store = dist.PrefixStore(f"{PREFIX}/{run}", own)
        self._here, self._others = str(here), [str(number) for number in range(count) if number != here]
        self._rows: tuple[float, str] = (-FRESH_S, "[]")
        self._heard: dict[str, tuple[float, bytes]] = {}
        self._verdict = ""
        self._open = True
        self._store.set(self._here, "[]")
        threading.Thread(target=self._run, name="watch-hosts", daemon=True).start()

    def close(self) -> None:
        """Stop exchanging rows."""
        self._open = False

    def show(self, sights: Sequence[Sight]) -> None:
        """Show the rows of this host to the others, some time soon."""
        now = time.monotonic()
        self._rows = now, json.dumps([now, *map(asdict, sights)])

    def sights(self, now: float) -> list[Sight]:
        """Return the rows of all other hosts that have ever been heard of."""
        found = []
        for heard_at, content in self._heard.values():
            silent = now - heard_at
            for row in json.loads(content)[1:]:
                sight = Sight(**{**row, "phase": Phase(row["phase"])})
                found.append(replace(sight, still=sight.still + silent, silent=silent))
        return found

    def verdict(self) -> Verdict | None:
        """Return the verdict of another host."""
        return Verdict.load(self._verdict) if self._verdict else None

    def claim(self, verdict: Verdict) -> bool:
        """Tell the other hosts of a verdict; returns whether this one is the first, which reports it.

        A store that does not answer can block for long, whatever its timeout; then this host reports as well.
        """
        answers: list[bool] = []

        def ask() -> None:
            with suppress(RuntimeError):
                first = self._store.add("claims", 1) == 1
                if first:
                    self._store.set("verdict", verdict.dump())
                answers.append(first)

        asking = threading.Thread(target=ask, name="watch-claim", daemon=True)
        asking.start()
        asking.join(ANSWER_S)
        return answers[0] if answers else True

    def _run(self) -> None:
        while self._open:
            time.sleep(EVERY_S)
            now = time.monotonic()
            shown_at, rows = self._rows
            if now - shown_at > FRESH_S:  # another rank judges
                continue
            with suppress(RuntimeError):  # dist.DistError is one: no answer
                self._store.set(self._here, rows)
                for name, content in zip(self._others, self._store.multi_get(self._others), strict=True):
                    if content != self._heard.get(name, (0.0, b""))[1] and content != b"[]":
                        self._heard[name] = time.monotonic(), content
                if self._store.check(["verdict"]):
                    self._verdict = self._store.get("verdict").decode()
