"""Find the rank that blocks a run: pure rules on the status of all ranks.

Dead: a process that the others need has ended. It is named at once, unless it exited outside of the harness's code and
nobody has lost it yet, or reported its error.
Silent: a host has not answered for too long.
Hang: no rank has made progress for longer than its phase allows. The rank named is one whose process is stopped, or
that does not itself wait for others. A stopped process is named even while others make progress. A run of a single
rank never hangs: nobody waits for it.

On a GPU, collectives return at once, and ranks wait later, for their device. If all ranks wait, the rank that skipped a
collective is named (`enqueued.py`), or one that has made less progress than the others of its stage, if there is one.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from harness.resilience.process.activity import BEATS_OF_STEP, Phase
from harness.resilience.process.records import HANG
from harness.topology.agreement import spell_ranks

ENDING_S = 10.0  # after a rank has reported its own error: time for its launcher to end the others
FRESH_S = 3.0  # a watching thread that has not run for this long is stuck; it should run five times a second
SILENT_S = 6.0  # limit for a silent host once a rank has lost a connection
LONGEST = 250  # characters of a message to other ranks; in UTF-8 it fits the board
INSIDE = (Phase.STEP, Phase.SLOW)


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The status of a rank; times are in seconds."""

    rank: int
    stage: int
    host: str
    pid: int
    phase: Phase
    step: int
    beats: int  # count of its progress; ranks of one stage count alike within a step
    doing: str
    still: float  # time since its last progress
    unwatched: float  # time since its own watching thread ran
    silent: float  # time since its host last answered; 0 on this host
    limit: float  # time without progress that its phase allows; 0 for no limit
    state: str  # letter of its process in /proc; empty once it is gone
    ending: str  # how its process ended, if known
    waits: bool  # whether its main thread waits for other ranks
    place: str  # the collective that it waits in, else its line of code
    work: float  # share of its steps in which it does not wait; negative if unknown

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return self.state in ("", "Z", "X")

    @property
    def name(self) -> str:
        """Rank, stage and host."""
        return f"rank {self.rank} (stage {self.stage}, host {self.host})"

    @property
    def is_still(self) -> bool:
        """Whether it has shown no progress for longer than allowed."""
        return 0 < self.limit < self.still

    @property
    def is_stuck(self) -> bool:
        """Whether it may block the others: it does not wait for them, or is stopped."""
        return not self.waits or self.state == "T" or self.unwatched > FRESH_S

    def __str__(self) -> str:
        if self.is_gone:
            how = self.ending or "gone"
        elif self.silent > FRESH_S:
            how = f"not heard from for {self.silent:.0f} s"
        elif self.state in ("T", "t"):
            how = f"stopped (process state {self.state})"
        else:
            how = f"waits in {self.place}" if self.waits else f"at {self.place}"
        state = f", process state {self.state}" if self.state and self.state not in "Tt" else ""
        return f"{self.name}, step {self.step}, {self.doing}: {how}, no progress for {self.still:.0f} s{state}"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why the run ends."""

    error: str  # Dead, Hang or Silent
    culprit: int  # the rank at fault; -1 if every rank waits for another
    step: int
    message: str  # one line for the user

    def dump(self) -> str:
        """Serialise for the other ranks."""
        return json.dumps({**asdict(self), "message": self.message[:LONGEST]}, ensure_ascii=False)

    @classmethod
    def load(cls, text: str) -> Diagnosis:
        """Read what `dump` has made. ValueError if it is something else."""
        return TypeAdapter(cls).validate_json(text)


def diagnose(statuses: Sequence[RankStatus], *, is_whole: bool = True) -> Diagnosis | None:
    """Return why the run cannot go on; None while it can.

    `is_whole`: whether `statuses` holds all ranks. If not, they may all be waiting for a rank that is not listed.
    """
    if not any(each.phase in (*INSIDE, Phase.LOST) for each in statuses if not each.is_gone):
        return None
    return _dead(statuses) or _silent(statuses) or _hang(statuses, is_whole)


def _dead(statuses: Sequence[RankStatus]) -> Diagnosis | None:
    """Find a process that is gone while others need it."""
    is_missed = any(each.phase is Phase.LOST for each in statuses if not each.is_gone)
    for each in statuses:
        if each.is_gone and (each.phase in INSIDE or (is_missed and each.phase is Phase.OUTSIDE)):
            how = each.ending or "has ended"
            memory = "; was it out of memory?" if "SIGKILL" in how else ""
            return _verdict("Dead", each, f"{each.name} {how} in step {each.step}, during: {each.doing}{memory}")
    waited = max((each.still for each in statuses if each.phase in INSIDE and not each.is_gone), default=0.0)
    ends = [each for each in statuses if each.is_gone or each.phase is Phase.FAILED]
    for each in ends if waited > ENDING_S else []:
        if each.still > ENDING_S:
            how = each.ending or "has ended"
            where = f"in step {each.step}"
            if each.phase is Phase.FAILED:
                how = "failed"
                where = f"{where} (see its log)"
            return _verdict("Dead", each, f"{each.name} {how} {where}; other ranks still wait for it")
    return None


def _silent(statuses: Sequence[RankStatus]) -> Diagnosis | None:
    """Find a host that no longer answers."""
    lost = any(each.phase is Phase.LOST for each in statuses)
    limit = SILENT_S if lost else max((each.limit for each in statuses if each.phase is Phase.STEP), default=0.0)
    silent = [each for each in statuses if 0 < limit < each.silent]
    if not silent:
        return None
    first = silent[0]
    ranks = spell_ranks([each.rank for each in silent if each.host == first.host])
    text = f"host {first.host} has not answered for {first.silent:.0f} s: {ranks} in step {first.step}"
    return _verdict("Silent", first, f"{text}; the host or the network to it may be down")


def _hang(statuses: Sequence[RankStatus], is_whole: bool) -> Diagnosis | None:
    """Find whether all ranks have stopped making progress, and which one is at fault."""
    stopped = [each for each in statuses if each.state == "T" and each.is_still]
    working = [each for each in statuses if each.phase in INSIDE and not each.is_gone]
    may_wait = len(statuses) > 1 and (len(working) > 1 or any(each.waits for each in working))  # one for another
    if not stopped and not (is_whole and may_wait and all(each.is_still for each in statuses)):
        return None
    stuck = stopped or [each for each in statuses if each.is_stuck]
    if len(stuck) == len(statuses) > 1 and not stopped:
        stuck = _behind(stuck)
    if not stuck:
        step = max(each.step for each in statuses)
        wait = " and wait for each other" if all(each.waits for each in statuses) else ""
        text = f"all ranks hang in step {step}{wait}: {_places(statuses)}"
        return Diagnosis(error=HANG, culprit=-1, step=step, message=text)
    first = stuck[0]
    where = "stopped (process state T)" if first.state == "T" else f"at {first.place}"
    others = "".join(f"; {each.name} likewise" for each in stuck[1:2])
    waiting = [each for each in statuses if each not in stuck and each.waits]
    text = f"{first.name} hangs in step {first.step}, during: {first.doing}, {where}, for {first.still:.0f} s{others}"
    return _verdict(HANG, first, text + _waiting(waiting))


def _behind(stuck: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks with less progress than others of their stage, the least first."""
    furthest = {each.stage: each.beats for each in sorted(stuck, key=lambda each: each.beats)}

    def is_behind(each: RankStatus) -> bool:
        first = furthest[each.stage]
        is_earlier = each.beats // BEATS_OF_STEP < first // BEATS_OF_STEP
        return is_earlier or (each.phase is Phase.STEP and each.beats < first)  # else ranks may do different things

    return sorted(filter(is_behind, stuck), key=lambda each: each.beats)


def _places(statuses: Sequence[RankStatus]) -> str:
    """Format where each rank is, with ranks at the same place together."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for each in statuses:
        ranks[each.place].append(each.rank)
    return ", ".join(f"{spell_ranks(those)} in {place}" for place, those in ranks.items())


def _waiting(waiting: Sequence[RankStatus]) -> str:
    """Format which ranks wait for the culprit, in which collective and instruction."""
    if not waiting:
        return ""
    (kind, count), *others = Counter((each.doing, each.place) for each in waiting).most_common()
    ranks = spell_ranks([each.rank for each in waiting if (each.doing, each.place) == kind])
    text = f"; {ranks} {'waits' if count == 1 else 'wait'} for it ({', '.join(kind)})"
    return text + (f", and {len(waiting) - count} more" if others else "")


def _verdict(error: str, culprit: RankStatus, message: str) -> Diagnosis:
    return Diagnosis(error=error, culprit=culprit.rank, step=culprit.step, message=message)
