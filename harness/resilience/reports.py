"""How the ranks of a start ended: what each host reports, and what the cause was by the reports of all."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.resilience.cause import Cause, first_cause, oom_kills
from harness.resilience.on_host.ranks import Exit
from harness.resilience.process.records import STOPPED, Failure, Position, read_failures, read_positions, succeeded
from harness.resilience.process.signals import SIGNALS
from harness.resilience.team import Team

REPORT_S = 2.0  # after a failure: time for the other ranks to record why they fail
DONE_S = 60.0  # after a stop by a signal, or success: time for the other ranks to exit
ENDS = {"fault": REPORT_S, "stop": DONE_S, "done": DONE_S, "hosts": REPORT_S}
"""Why a start is over, and how long ranks that are left may take."""
BY_SIGNAL = {code for number in SIGNALS for code in (128 + number, -number)}
"""Exit codes of ranks that a signal has ended."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """How the ranks of a host ended. Times are in seconds from when this host saw that the start was over."""

    exits: list[Exit]
    failures: list[Failure]
    positions: list[Position]
    success: bool | None  # whether rank 0 has recorded success; None for a program that does not record it
    kills: int | None  # number of processes that the kernel killed for lack of memory; None if unknown
    received: int  # signal that asked this host's launch to end; 0 if none did

    @classmethod
    def of(
        cls, records: Path, exits: Sequence[Exit], seen: float, kills: int | None, received: Sequence[int]
    ) -> Report:
        """Return what a host knows of the end of its ranks.

        Args:
            exits: of the ranks that exited by themselves.
            seen: time at which this host saw that the start was over. All hosts see it at once; their clocks differ.
            kills: what `oom_kills` returned when the start began.
            received: signals that asked the launch to end.
        """
        now = oom_kills()
        return cls(
            exits=[each._replace(time=each.time - seen) for each in exits],
            failures=[replace(failure, time=failure.time - seen) for failure in read_failures(records)],
            positions=list(read_positions(records).values()),
            success=succeeded(records),
            kills=None if now is None or kills is None else now - kills,
            received=received[0] if received else 0,
        )


def why_over(records: Path, exits: Sequence[Exit], count: int) -> str:
    """Return why a start is over, judged by the `count` ranks of one host; empty while it is not.

    "finished": all have exited with 0. The start goes on while other hosts have ranks.
    """
    if not count:
        return ""
    failures = read_failures(records)
    if _is_bad(failures, exits):
        return "fault"
    if failures:
        return "stop"
    if succeeded(records):
        return "done"
    return "finished" if len(exits) == count else ""


def have_reported(records: Path, exits: Sequence[Exit], count: int, why: str, waited: float) -> bool:
    """Return whether all ranks of a host have ended or recorded why they fail, or have had time enough for it."""
    failures = read_failures(records) if count else []
    wrong = [failure for failure in failures if failure.error != STOPPED]
    told = {rank for rank, _, _ in exits} | {failure.rank for failure in wrong}
    if len(told) == count and not any(failure.is_user_error for failure in wrong if len(exits) < count):
        return True
    return waited > (REPORT_S if _is_bad(failures, exits) else ENDS[why])


def _is_bad(failures: Sequence[Failure], exits: Sequence[Exit]) -> bool:
    """Return whether a rank has failed, other than by a signal after which it saved."""
    errors = {failure.rank: failure.error for failure in failures}
    return bool({*errors.values()} - {STOPPED}) or any(code and rank not in errors for rank, code, _ in exits)


def cause_of(team: Team, reports: Mapping[int, Report], lost: set[str], text: str, last_step: int) -> Cause | None:
    """Return what ended a start; None for success.

    Args:
        reports: of the hosts, by their place in the team; those of `lost` agents are missing.
        text: error of an agent itself; empty if a rank has failed.
        last_step: the last step in the store, for hosts that do not report.
    """
    exits = [each for report in reports.values() for each in report.exits]
    successes = [report.success for report in reports.values()]
    ranks = sum(len(offer.devices) for offer in team.offers)
    if True in successes or (False not in successes and [each.code for each in exits] == [0] * ranks):
        return None
    failures = sorted((each for report in reports.values() for each in report.failures), key=lambda each: each.time)
    reached = {each.rank: each for report in reports.values() for each in report.positions}
    step = max((position.step for position in reached.values()), default=last_step)
    if text:
        return Cause(text=text, step=step, may_pass=True)
    names = ", ".join(offer.host for offer in team.offers if offer.node in lost)
    if names:  # other ranks only record that they have lost these peers
        missed = {failure.rank for failure in failures if failure.is_lost_peer}
        failures = [failure for failure in failures if failure.rank not in missed]
        exits = [each for each in exits if each.rank not in missed]
    kills = [report.kills for report in reports.values() if report.kills is not None]
    hosts = {each.rank: team.offers[index].host for index, report in reports.items() for each in report.exits}
    positions = {**{rank: Position(rank=rank, host=host) for rank, host in hosts.items()}, **reached}
    cause = first_cause(failures, exits, positions, oom_kills=sum(kills) if kills else None)
    if cause is not None and not (names and cause.code == 128 + signal.SIGTERM):  # sent when a rank's agent dies
        return replace(cause, device=team.device(cause.rank))
    return Cause(text=f"no answer from the agent on {names or 'a host'}, in step {step}", step=step, may_pass=True)
