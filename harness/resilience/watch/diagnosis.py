"""Who holds the others up: pure rules on what the ranks show.

A rank that is gone is at fault at once, unless it had ended as it should or has named its error itself. Ranks hang
when none that somebody waits for has shown progress for as long as its phase allows. Then a stopped process, or one
that does not wait for others itself, is the one to name. A stopped process, or a host that has fallen silent, needs
no such proof.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from harness.resilience.process.records import HANG
from harness.resilience.watch.activity import Phase
from harness.topology.agreement import spell_ranks

ENDING_S = 10.0  # for a rank that has named its own error: its launcher ends the others meanwhile
FRESH_S = 3.0  # a thread that watches looks five times a second
SILENT_S = 6.0  # of a host, where another rank has lost a connection
LONGEST = 250  # characters of a message that other ranks get: it must fit their board, however it is encoded
INSIDE = (Phase.STEP, Phase.SLOW)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """How a rank looks, seconds counted until now.

    Attributes:
        still: since it last showed progress.
        unwatched: since its own watching thread last ran.
        silent: since its host was last heard of; 0 on this host.
        limit: seconds without progress that its phase allows; 0 for no limit.
        state: its process's letter in /proc; empty once it is gone.
        ending: how it ended, as far as that is known.
    """

    rank: int
    stage: int
    host: str
    pid: int
    phase: Phase
    step: int
    doing: str
    still: float
    unwatched: float
    silent: float
    limit: float
    state: str
    ending: str
    waits: bool
    place: str
    work: float

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
        """Whether it holds others up, as far as it can be told: it does nothing, and does not wait for anybody."""
        return not self.waits or self.state == "T" or self.unwatched > FRESH_S

    def __str__(self) -> str:
        if self.is_gone:
            how = self.ending or "gone"
        elif self.silent > FRESH_S:
            how = f"not heard of for {self.silent:.0f} s"
        elif self.state in ("T", "t"):
            how = f"stopped (process state {self.state})"
        else:
            how = f"waits in {self.place}" if self.waits else f"at {self.place}"
        state = f", process state {self.state}" if self.state and self.state not in "Tt" else ""
        return f"{self.name}, step {self.step}, {self.doing}: {how}, no progress for {self.still:.0f} s{state}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the run ends.

    Attributes:
        error: Dead, Hang or Silent.
        culprit: the rank to name; -1 where every rank waits for another.
        step: where it happened.
        message: one line for the user.
    """

    error: str
    culprit: int
    step: int
    message: str

    def dump(self) -> str:
        """Return it as text, for the other ranks."""
        return json.dumps({**asdict(self), "message": self.message[:LONGEST]}, ensure_ascii=False)

    @classmethod
    def load(cls, text: str) -> Verdict:
        """Read what `dump` has made."""
        return cls(**json.loads(text))


def diagnose(sights: Sequence[Sight]) -> Verdict | None:
    """Return why the run cannot go on; None while it can."""
    if not any(each.phase in (*INSIDE, Phase.LOST) for each in sights if not each.is_gone):
        return None
    return _dead(sights) or _silent(sights) or _hang(sights)


def _dead(sights: Sequence[Sight]) -> Verdict | None:
    """Find a process that has ended while others need it."""
    for each in sights:
        if each.is_gone and each.phase in INSIDE:
            how = each.ending or "has ended"
            memory = "; was it out of memory?" if "SIGKILL" in how else ""
            return _verdict("Dead", each, f"{each.name} {how} in step {each.step}, during: {each.doing}{memory}")
    waited = max((each.still for each in sights if each.phase in INSIDE and not each.is_gone), default=0.0)
    ends = [each for each in sights if each.is_gone or each.phase is Phase.FAILED]
    for each in ends if waited > ENDING_S else []:
        if each.still > ENDING_S:
            how = "failed: its log says why" if each.phase is Phase.FAILED else each.ending or "has ended"
            return _verdict("Dead", each, f"{each.name} {how}, step {each.step}; other ranks still wait for it")
    return None


def _silent(sights: Sequence[Sight]) -> Verdict | None:
    """Find a host that is not heard of any more."""
    lost = any(each.phase is Phase.LOST for each in sights)
    limit = SILENT_S if lost else max((each.limit for each in sights if each.phase is Phase.STEP), default=0.0)
    silent = [each for each in sights if 0 < limit < each.silent]
    if not silent:
        return None
    first = silent[0]
    ranks = spell_ranks([each.rank for each in silent if each.host == first.host])
    text = f"host {first.host} has not answered for {first.silent:.0f} s: {ranks} in step {first.step}"
    return _verdict("Silent", first, f"{text}; is it down, or the network between the hosts?")


def _hang(sights: Sequence[Sight]) -> Verdict | None:
    """Find ranks that have stopped making progress, and who is at fault."""
    stopped = [each for each in sights if each.state == "T" and each.is_still]
    if not stopped and not all(each.is_still for each in sights):
        return None
    stuck = stopped or [each for each in sights if each.is_stuck]
    if not stuck:
        step = max(each.step for each in sights)
        places = ", ".join(sorted({f"rank {each.rank} in {each.place}" for each in sights}))
        text = f"all ranks hang in step {step} and wait for each other: {places}"
        return Verdict(error=HANG, culprit=-1, step=step, message=text)
    first = stuck[0]
    where = "stopped (process state T)" if first.state == "T" else f"at {first.place}"
    others = "".join(f"; {each.name} likewise" for each in stuck[1:2])
    waiting = [each for each in sights if each not in stuck and each.waits]
    text = f"{first.name} hangs in step {first.step}, during: {first.doing}, {where}, for {first.still:.0f} s{others}"
    return _verdict(HANG, first, text + _waiting(waiting))


def _waiting(waiting: Sequence[Sight]) -> str:
    """Say who waits, in which collectives and instructions."""
    if not waiting:
        return ""
    kinds: dict[str, list[int]] = {}
    for each in waiting:
        kinds.setdefault(f"{each.doing}, {each.place}", []).append(each.rank)
    (kind, ranks), more = max(kinds.items(), key=lambda item: len(item[1])), len(kinds) - 1
    text = f"; {spell_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it ({kind})"
    return text + (f", and {len(waiting) - len(ranks)} more" if more else "")


def _verdict(error: str, culprit: Sight, message: str) -> Verdict:
    return Verdict(error=error, culprit=culprit.rank, step=culprit.step, message=message)
