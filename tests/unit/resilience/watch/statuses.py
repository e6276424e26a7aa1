"""What a rank says of itself to the watchdog, in tests."""

from __future__ import annotations

from typing import Any

from harness.resilience.process.activity import BEATS_OF_STEP, Phase
from harness.resilience.watch.diagnosis import RankStatus


def rank_status(rank: int, **changes: Any) -> RankStatus:
    """A rank that trains, and waits for others in a collective."""
    usual: dict[str, Any] = {
        "rank": rank,
        "stage": rank,
        "host": "a",
        "pid": 100 + rank,
        "phase": Phase.STEP,
        "step": 7,
        "beats": 7 * BEATS_OF_STEP + 5,
        "doing": f"RecvGrad({rank})",
        "still": 0.1,
        "unwatched": 0.1,
        "silent": 0.0,
        "limit": 30.0,
        "state": "S",
        "ending": "",
        "waits": True,
        "place": "recv",
        "work": 0.5,
    }
    return RankStatus(**{**usual, **changes})
