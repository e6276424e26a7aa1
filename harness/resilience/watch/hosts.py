"""Exchange the status of ranks between hosts, through the store of the process group.

The judging rank of each host writes the status of its host's ranks. The first host, which serves the store, reads those
of all others and judges the whole run; the others read only the first host's. So the load is linear in the number of
hosts. Each message has a summary besides the statuses: while all is well, the first host reads nothing else. The
exchange has a thread and a connection of its own, so that a slow network delays nothing else.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from datetime import timedelta

import torch.distributed as dist
from pydantic import TypeAdapter

from harness.errors import UserError
from harness.resilience.watch.diagnosis import FRESH_S, INSIDE, SILENT_S, Diagnosis, RankStatus
from harness.topology.signed_store import SignedStore

EVERY_S = 1.0
ANSWER_S = 5.0
PREFIX = "watch"
NAMES = tuple(field.name for field in fields(RankStatus))
SUMMARY = TypeAdapter(tuple[float, float, bool])  # time at which the statuses were shown, and their summary


def summary(statuses: Sequence[RankStatus]) -> tuple[float, bool]:
    """Return all that the first host needs of a host while all is well.

    That is the seconds until all of its ranks would be over their limits without progress, and whether one of them is
    gone, failed, stopped or outside of training.
    """
    left_s = max((each.limit - each.still if each.limit else math.inf for each in statuses), default=0.0)
    is_odd = any(each.is_gone or each.state == "T" or each.phase not in INSIDE for each in statuses)
    return left_s, is_odd


class _Message:
    """The last message of a host."""

    def __init__(self, content: bytes) -> None:
        self.at = time.monotonic()
        self.content = content
        summaries, _, self._packed = content.partition(b"\n")
        _, self.left_s, self.is_odd = SUMMARY.validate_json(summaries)
        self._rows: list[RankStatus] | None = None

    def statuses(self, now: float) -> list[RankStatus]:
        """Return the statuses aged to `now`."""
        if self._rows is None:
            self._rows = _rows(self._packed)
        silent = now - self.at
        return [replace(row, still=row.still + silent, silent=silent) for row in self._rows]


def _rows(packed: bytes) -> list[RankStatus]:
    """Return the statuses in a message; none if it is not one, as strangers may send to a run without a secret."""
    with suppress(ValueError, TypeError):
        rows = [dict(zip(NAMES, row, strict=True)) for row in json.loads(packed)]
        return TypeAdapter(list[RankStatus]).validate_python(rows)
    return []


class OtherHosts:
    """The last statuses of other hosts: of all others on the first host, of the first host elsewhere.

    Args:
        store: of the process group; a second connection to it is opened.
        here: index of this host among `count` hosts.
        run: name of the run, for its keys: an earlier run of the same processes has used the same store.
    """

    def __init__(self, store: dist.Store, here: int, count: int, run: str) -> None:
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        own.set_timeout(timedelta(seconds=ANSWER_S))
        self._store = SignedStore(own, f"{PREFIX}/{run}/")
        self.judges_all = here == 0
        self._here = str(here)
        self._others = [str(number) for number in range(1, count)] if self.judges_all else ["0"]
        self._shown: tuple[float, Sequence[RankStatus]] = (-FRESH_S, ())
        self._heard: dict[str, _Message] = {}
        self._verdict: Diagnosis | None = None
        self._open = True
        self._store.set(self._here, "")
        threading.Thread(target=self._run, name="watch-hosts", daemon=True).start()

    def close(self) -> None:
        """Stop the exchange."""
        self._open = False

    def show(self, statuses: Sequence[RankStatus]) -> None:
        """Set the statuses of this host; the thread sends them within EVERY_S seconds."""
        self._shown = time.monotonic(), statuses

    @property
    def is_whole(self) -> bool:
        """Whether this is the first host and has heard of all others, so that it may judge the run."""
        return self.judges_all and len(self._heard) == len(self._others)

    def is_well(self, here: Sequence[RankStatus], now: float) -> bool:
        """Return whether summaries alone rule out a verdict: all hosts answer, all ranks train, one makes progress."""
        left_s, is_odd = summary(here)
        heard = list(self._heard.values())
        if is_odd or any(each.is_odd or now - each.at > SILENT_S for each in heard):
            return False
        return left_s > 0 or any(each.left_s > now - each.at for each in heard)

    def statuses(self, now: float) -> list[RankStatus]:
        """Return the statuses of the hosts that have been heard of, aged to `now`."""
        return [row for each in list(self._heard.values()) for row in each.statuses(now)]

    def verdict(self) -> Diagnosis | None:
        """Return the verdict of another host."""
        return self._verdict

    def claim(self, verdict: Diagnosis) -> bool:
        """Tell the other hosts of a verdict; return whether this host is the first to have one, and so reports it.

        A store that is gone can block for longer than its timeout. So a thread asks; without an answer within ANSWER_S
        seconds this host reports.
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
        """Send the statuses of this host, and read those of the others, once."""
        shown_at, statuses = self._shown
        if time.monotonic() - shown_at > FRESH_S:  # another rank of this host judges now: this one stops sending
            self._heard = {}
            return
        # No answer (dist.DistError is a RuntimeError), or not a message of this run, which its host will write again.
        with suppress(RuntimeError, UserError, ValueError):
            summaries = json.dumps([shown_at, *summary(statuses)])  # the time marks equal statuses as new ones
            rows = json.dumps([[getattr(each, name) for name in NAMES] for each in statuses])
            self._store.set(self._here, f"{summaries}\n{rows}")
            for name, content in zip(self._others, self._store.multi_get(self._others), strict=True):
                known = self._heard.get(name)
                if content and (known is None or content != known.content):
                    self._heard[name] = _Message(content)
            if self._store.check(["verdict"]):
                self._verdict = Diagnosis.load(self._store.get("verdict").decode())

    def _run(self) -> None:
        while self._open:
            time.sleep(EVERY_S)
            self.exchange()
