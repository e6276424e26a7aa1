"""What the ranks of other hosts show, by way of the store in which all ranks have met.

Of each host the rank that judges writes the host's rows. The first host, where the store lies, reads those of all
others and judges for the whole run; the others read the first host's alone. So the load grows with the number of hosts
and not with its square. Before the rows stands a digest of them: while all is well, the first host reads nothing else.
A connection of its own and a thread of its own keep a slow network from everything else.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta

import torch.distributed as dist

from harness.resilience.process.activity import Phase
from harness.resilience.watch.diagnosis import FRESH_S, INSIDE, SILENT_S, RankStatus, Verdict

EVERY_S = 1.0
ANSWER_S = 5.0
PREFIX = "watch"
NAMES = tuple(field.name for field in fields(RankStatus))
NOTHING = b"[]"


@dataclass(frozen=True)
class Digest:
    """What the first host has to know of a host while all is well.

    Attributes:
        left_s: until the last of its ranks would have made no progress for longer than allowed.
        is_odd: whether one of its ranks has ended, failed, is stopped or is not at work.
    """

    left_s: float
    is_odd: bool

    @classmethod
    def of(cls, statuses: Sequence[RankStatus]) -> Digest:
        """Return the digest of a host's rows."""
        left = max((each.limit - each.still if each.limit else math.inf for each in statuses), default=0.0)
        is_odd = any(each.is_gone or each.state == "T" or each.phase not in INSIDE for each in statuses)
        return cls(left, is_odd)


class _Heard:
    """A host as it was last heard of."""

    def __init__(self, at: float, content: bytes) -> None:
        self.at, self.content = at, content
        digest, _, self._text = content.partition(b"\n")
        self.digest = Digest(*json.loads(digest)[1:])
        self._rows: list[RankStatus] | None = None

    def statuses(self, now: float) -> list[RankStatus]:
        """Return the rows as they are by now, if nothing has changed since."""
        if self._rows is None:
            rows = (dict(zip(NAMES, row, strict=True)) for row in json.loads(self._text))
            self._rows = [RankStatus(**{**row, "phase": Phase(row["phase"])}) for row in rows]
        silent = now - self.at
        return [replace(row, still=row.still + silent, silent=silent) for row in self._rows]


class OtherHosts:
    """The rows of other hosts, as they were last heard of: on the first host of all, elsewhere of the first.

    Args:
        store: that of the run; a connection of its own is made.
        here: number of this host; `count` is that of all.
        run: a name of the run, by which its rows are told from those of another one in the same store.
    """

    def __init__(self, store: dist.Store, here: int, count: int, run: str) -> None:
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        own.set_timeout(timedelta(seconds=ANSWER_S))
        self._store = dist.PrefixStore(f"{PREFIX}/{run}", own)
        self.judges_all = here == 0
        self._here = str(here)
        self._others = [str(number) for number in range(1, count)] if self.judges_all else ["0"]
        self._shown: tuple[float, Sequence[RankStatus]] = (-FRESH_S, ())
        self._heard: dict[str, _Heard] = {}
        self._verdict = ""
        self._open = True
        self._store.set(self._here, NOTHING.decode())
        threading.Thread(target=self._run, name="watch-hosts", daemon=True).start()

    def close(self) -> None:
        """Stop exchanging rows."""
        self._open = False

    def show(self, statuses: Sequence[RankStatus]) -> None:
        """Show the rows of this host to the others, some time soon."""
        self._shown = time.monotonic(), statuses

    @property
    def is_whole(self) -> bool:
        """Whether this host knows the rows of all others, and so may judge for the run."""
        return self.judges_all and len(self._heard) == len(self._others)

    def is_well(self, here: Sequence[RankStatus], now: float) -> bool:
        """Whether no verdict can come from the rows: all ranks are heard of and at work, and one makes progress."""
        own = Digest.of(here)
        heard = list(self._heard.values())
        if own.is_odd or any(each.digest.is_odd or now - each.at > SILENT_S for each in heard):
            return False
        return own.left_s > 0 or any(each.digest.left_s > now - each.at for each in heard)

    def statuses(self, now: float) -> list[RankStatus]:
        """Return the rows of those hosts that have ever been heard of."""
        return [row for each in list(self._heard.values()) for row in each.statuses(now)]

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

    def exchange(self) -> None:
        """Write the rows of this host and read those of the others, once."""
        shown_at, statuses = self._shown
        if time.monotonic() - shown_at > FRESH_S:  # another rank judges; what this one knows grows old
            self._heard = {}
            return
        with suppress(RuntimeError):  # dist.DistError is one: no answer
            self._store.set(self._here, _text(shown_at, statuses))
            for name, content in zip(self._others, self._store.multi_get(self._others), strict=True):
                known = self._heard.get(name)
                if content != NOTHING and (known is None or content != known.content):
                    self._heard[name] = _Heard(time.monotonic(), content)
            if self._store.check(["verdict"]):
                self._verdict = self._store.get("verdict").decode()

    def _run(self) -> None:
        while self._open:
            time.sleep(EVERY_S)
            self.exchange()


def _text(shown_at: float, statuses: Sequence[RankStatus]) -> str:
    """Return a line of the time, which tells rows from the same ones later, and the digest; then a line of the rows."""
    digest = Digest.of(statuses)
    rows = [[getattr(each, name) for name in NAMES] for each in statuses]
    return f"{json.dumps([shown_at, digest.left_s, digest.is_odd])}\n{json.dumps(rows, separators=(',', ':'))}"
