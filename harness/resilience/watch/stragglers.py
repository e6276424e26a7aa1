"""Find a slow rank (a straggler): it works for most of a step while its peers wait for it.

The watching thread samples five times a second whether the main thread waits for other ranks. So collectives need not
be timed, and the share of the time in which a rank works means the same in every layout. If stages have unequal work,
it is compared with the expected cost of the stage.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from harness.console import Console
from harness.resilience.process.activity import ACTIVITY, Phase
from harness.resilience.watch.diagnosis import RankStatus

SAMPLES, LEAST_SAMPLES = 100, 50  # number of the latest samples in the share of work: 20 s, at least 10 s
RATIO = 1.5  # least ratio of a straggler's share to the median of its peers
BUSY = 0.5  # a rank that works for less than this share of the time delays nobody
EVERY_S = 5.0
IN_A_ROW = 4  # comparisons before a warning: 20 s
AGAIN_S = 300.0  # time until the warning may be repeated


def share_of_work(samples: Sequence[bool]) -> float:
    """Return the share of the samples in which a rank does not wait for others; negative if there are too few."""
    return statistics.fmean(samples) if len(samples) >= LEAST_SAMPLES else -1.0


class Stragglers:
    """Warns of a rank that stays slower than its peers. Used on rank 0."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._looked_at = 0.0
        self._slowest = -1
        self._times = 0
        self._quiet_until = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether EVERY_S seconds have passed since the last comparison."""
        return now - self._looked_at >= EVERY_S

    def look(self, statuses: Sequence[RankStatus], now: float) -> None:
        """Compare the ranks, at most every EVERY_S seconds."""
        if not self.is_due(now) or len(statuses) < 2:
            return
        self._looked_at = now
        if any(each.phase is not Phase.STEP or each.work < 0 for each in statuses):
            return
        slowest, peers = slowest_rank(statuses, ACTIVITY.stage_costs)
        rank = -1 if slowest is None else slowest.rank
        self._times = self._times + 1 if rank == self._slowest else 1
        self._slowest = rank
        if slowest is not None and self._times >= IN_A_ROW and now >= self._quiet_until:
            self._quiet_until = now + AGAIN_S
            self.console.warn(
                f"{slowest.name} is slower than its peers: it works {slowest.work:.0%} of the time, "
                f"they work {peers:.0%} and wait for it (up to step {slowest.step})"
            )


def slowest_rank(statuses: Sequence[RankStatus], costs: Sequence[float]) -> tuple[RankStatus | None, float]:
    """Return the rank that clearly delays the others (None if none does), and the median share of the others."""
    slowest = max(statuses, key=lambda each: each.work)
    peers = [each for each in statuses if each is not slowest]
    usual = statistics.median(each.work for each in peers)
    expected = 1.0
    if costs:
        expected = costs[slowest.stage] / statistics.median(costs[each.stage] for each in peers)
    ratio = slowest.work / max(usual, 0.01)
    is_slow = slowest.work > BUSY and min(ratio, ratio / max(expected, 0.01)) > RATIO
    return (slowest if is_slow else None), usual
