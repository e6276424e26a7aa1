"""Start attempt after attempt until one succeeds, on the hosts that answer, from the newest checkpoint."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.checkpoint.directories import RESTARTS
from harness.console import print_if_heard
from harness.errors import UserError
from harness.resilience.attempt import Attempt
from harness.resilience.cause import Cause, Ended, first_cause, oom_kills
from harness.resilience.gathering import Device, Gathering, Team, wait
from harness.resilience.hosts import HostDevices
from harness.resilience.on_host.processes import become_subreaper, sweep
from harness.resilience.options import Options
from harness.resilience.process.records import read_failures, read_positions, succeeded
from harness.resilience.process.signals import SIGNALS
from harness.resilience.script import Script
from harness.wording import counted

SAME_STEP = 3  # give up after so many failures of the code in a row at one step
SAME_STEP_ELSEWHERE = 5  # the same for failures that may pass: a full disk, a network
PAUSE_S = 2.0  # before a restart at the same step
PAUSES_S = (10.0, 60.0, 300.0)  # the same if the cause may pass: before the second, the third and later restarts


class Supervisor:
    """Runs attempts, decides after each whether to start another, and cleans up.

    Attributes:
        received: signals that this process got.
        faults: causes of the failed attempts, each with the device of the rank that failed first, if known.
        is_growing: whether the ranks were told to save and stop because a missing host is back.
    """

    def __init__(self, options: Options, hosts: Sequence[HostDevices]) -> None:
        self.options = options
        self.script = Script(options.script)
        if options.max_restarts:
            self.script.require_resumable()
        self.gathering = Gathering(options, hosts, self.script)
        self.received: list[int] = []
        self.faults: list[tuple[Cause, Device | None]] = []
        self.is_growing = False
        self.root = _records_root(hosts, self.script.output_dir)

    def run(self) -> int:
        """Run the script to its end; return the exit code."""
        become_subreaper()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda number, _: self.received.append(number))
        try:
            for attempt in itertools.count():
                team = self.gathering.team(attempt, _say, self.received)
                code = 1 if team is None else self._judge(self._attempt(attempt, team), team)
                if self.received and code != 0:
                    return 128 + self.received[0]
                if code is not None:
                    return code
        finally:
            self.gathering.ready.end()
            sweep(str(self.root))
            shutil.rmtree(self.root, ignore_errors=True)
        raise AssertionError("attempts do not run out")

    def _attempt(self, number: int, team: Team) -> Cause | None:
        """Start all ranks once, wait for their end, and return its cause; None for success."""
        records, following = (self.root / f"{index:04d}" for index in (number, number + 1))
        try:
            records.mkdir(parents=True)
        except OSError as error:
            for agent in team.agents:
                agent.end()
            step = self.faults[-1][0].step if self.faults else 0
            return Cause(text=f"{records}: cannot be made: {error.strerror}", step=step, may_pass=True)
        attempt, kills, self.is_growing = Attempt(team.agents, team.start.ranks, records), oom_kills(), False
        try:
            self.gathering.order(team, records, self.root)
            ended = attempt.run(self.received, lambda attempt: self._look(attempt, team, following))
        finally:
            attempt.end()
            self.gathering.stop_looking()
            sweep(str(self.root), kept=self.gathering.ready.processes)
        is_done = succeeded(records)
        if is_done or (is_done is None and [end.code for end in ended] == [0] * team.start.ranks):
            return None
        now = oom_kills()
        more_kills = None if kills is None or now is None else now - kills
        return self._cause(records, ended, [host.name for host in attempt.lost], more_kills)

    def _cause(self, records: Path, ended: list[Ended], lost: list[str], kills: int | None) -> Cause:
        positions = read_positions(records)
        failures = [failure for failure in read_failures(records) if not (lost and failure.is_lost_peer)]
        cause = first_cause(failures, ended, positions, oom_kills=kills)
        if cause is not None:
            return cause
        step = max((position.step for position in positions.values()), default=0)
        text = f"no answer from the agent on {', '.join(lost) or 'this host'}, in step {step}"
        return Cause(text=text, step=step, may_pass=True)

    def _look(self, attempt: Attempt, team: Team, following: Path) -> None:
        """Prepare the next attempt. If a missing host is back, tell the ranks to save and stop, to go on with it."""
        if len(self.faults) < self.options.max_restarts:
            self.gathering.ready.look([agent.host for agent in team.agents], attempt.records, following)
        if not self.is_growing and self.gathering.missing and read_positions(attempt.records):
            self.is_growing = self.gathering.returned()
            if self.is_growing:
                attempt.signal(signal.SIGUSR1)

    def _judge(self, cause: Cause | None, team: Team) -> int | None:
        """Return the exit code; None to start again, after a pause."""
        restarts, most = len(self.faults), self.options.max_restarts
        if cause is None:
            if restarts:
                _say(f"done, after {counted(restarts, 'restart')}")
            return 0
        if self.received:
            return cause.code
        if self.is_growing and cause.is_stop:
            _say("a host is back: going on with all hosts that answer")
            return None
        if not (cause.is_final and cause.rank == 0):  # rank 0 has printed the error itself
            _say(cause.text)
        if cause.is_final and restarts == 0:
            return cause.code
        self.faults.append((cause, None if cause.rank is None else team.device(cause.rank)))
        self._log(cause, team)
        same = len(list(itertools.takewhile(lambda fault: fault[0].step == cause.step, reversed(self.faults))))
        allowed = SAME_STEP_ELSEWHERE if cause.may_pass else SAME_STEP
        if most and (restarts == most or same >= allowed):
            used_up = f"{counted(most, 'restart')} {'is' if most == 1 else 'are'} used up"
            why = used_up if restarts == most else f"{same} faults in a row at step {cause.step}"
            _say("\n  ".join([f"gave up: {why}", *(f"step {fault.step}: {fault.text}" for fault, _ in self.faults)]))
        if restarts == most or same >= allowed:
            return cause.code
        is_left_out = self._leave_out_device()
        pause = 0.0 if same == 1 or is_left_out else PAUSE_S
        if pause and cause.may_pass:
            pause = PAUSES_S[min(same - 2, len(PAUSES_S) - 1)]
        _say(f"restart {restarts + 1} of {most}{f' in {pause:.0f} s' if pause else ''}")
        wait(pause, self.received)
        return None

    def _leave_out_device(self) -> bool:
        """Exclude a device that failed twice in a row before the first step, if --min_ranks allows fewer ranks.

        Returns whether a device was excluded.
        """
        last = [(fault.step, device) for fault, device in self.faults[-2:]]
        device = last[-1][1]
        if not self.options.min_ranks or device is None or last != [(0, device)] * 2:
            return False
        self.gathering.failing.add(device)
        _say(f"device {device[1]} of {device[0]} is left out: it failed twice before the first step")
        return True

    def _log(self, cause: Cause, team: Team) -> None:
        folder = self.script.output_dir
        line = {"time": time.time(), "step": cause.step, "cause": cause.text, "start": str(team.start)}
        with suppress(OSError):
            if folder is not None and folder.is_dir():
                with (folder / RESTARTS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def _records_root(hosts: Sequence[HostDevices], output_dir: Path | None) -> Path:
    """Create the folder for records: temporary, or in the output directory, which several hosts share."""
    is_shared = output_dir is not None and not all(host.is_here for host in hosts)
    try:
        if not is_shared or output_dir is None:
            return Path(tempfile.mkdtemp(prefix="ds-harness-"))
        (output_dir / "logs").mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="records-", dir=output_dir / "logs"))
    except OSError as error:
        where = output_dir if is_shared else tempfile.gettempdir()
        raise UserError(f"{where}: no folder can be made for what the ranks record: {error.strerror}") from error


def _say(text: str) -> None:
    print_if_heard(f"ds-harness launch: {text}", sys.stderr)
