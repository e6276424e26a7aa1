"""A thread on each rank that shows the rank's progress to the others, and ends a run that cannot go on.

The lowest rank of a host whose thread runs judges all ranks of the host; if it is dead or stopped, the next one does.
The threads run while the main threads wait in a collective or loop in Python.
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from harness.arguments import TrainingArguments
from harness.console import Console
from harness.device.process_group import shared_store
from harness.resilience.process import signals
from harness.resilience.process.activity import ACTIVITY, Phase
from harness.resilience.process.records import HANG, THIS_RANK
from harness.resilience.watch.board import Board
from harness.resilience.watch.diagnosis import FRESH_S, RankStatus, Verdict, diagnose
from harness.resilience.watch.ending import announce, append_stacks, main_frame, stacks_file
from harness.resilience.watch.enqueued import (
    Enqueued,
    abort_groups,
    count_transfers,
    enqueued,
    flight_record,
    left_out,
)
from harness.resilience.watch.hosts import OtherHosts
from harness.resilience.watch.stragglers import Stragglers, WorkShare
from harness.topology.agreement import any_rank, value_of_first, values_beside
from harness.topology.env import run_timeout
from harness.topology.groups import Groups
from harness.topology.placement import host_id
from harness.topology.processes import status_of

POLL_S = 0.2
STATES_S = 1.0  # interval of looks at process states in /proc; the exit of a process wakes the thread at once
PAUSED_S = 5.0  # if this thread has not run for so long, the whole host may have slept: times start anew
SLOW_S = 600.0  # limit without progress outside of steps, and in the first step, which may compile
MEDIANS = 5.0  # limit within a step, in medians of the latest steps' times
IO_BYTES = 2**20  # reading or writing so much counts as progress outside of steps
WRITING_S = 3.0  # time for the ranks of a host to write their stacks
ABORTING_S = 3.0  # time for NCCL to end its kernels
TELLING_S = 2.5  # time for other hosts to read the verdict from the store, whose server ends with rank 0


@dataclass(frozen=True, kw_only=True)
class Member:
    """What all ranks know of a rank.

    Attributes:
        started: start time of the process, which tells it from a later one with the same pid.
    """

    rank: int
    stage: int
    host: str
    pid: int
    started: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the seconds without progress.

    Attributes:
        hang: the least limit in a step (`--hang_seconds`); 0 turns the search for hangs off.
        longest: upper bound, below the timeout of a collective: its error would not name the rank at fault.
    """

    hang: float
    longest: float

    def of(self, phase: Phase, step_seconds: float | None) -> float:
        """Return the limit in a phase, 0 for none. `step_seconds`: median time of the latest steps, if known."""
        if self.hang == 0:
            return 0.0
        if phase is not Phase.STEP or step_seconds is None:
            return min(max(SLOW_S, self.hang), self.longest)
        return min(max(self.hang, MEDIANS * step_seconds), self.longest)


class Watcher:
    """Watches the ranks of this host, and through `others` those of all hosts.

    Args:
        members: the ranks of this host, in order; `me` is the index of this rank.
        output_dir: folder for the stacks of a hang.
        store: where ranks with an accelerator tell what they have enqueued there; None without one.
    """

    def __init__(
        self,
        board: Board,
        members: list[Member],
        me: int,
        limits: Limits,
        console: Console,
        output_dir: Path,
        others: OtherHosts | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self.store = store
        self._told: tuple[object, ...] = ()
        self.board, self.members, self.me = board, members, me
        self.limits, self.console, self.output_dir, self.others = limits, console, output_dir, others
        self.work = WorkShare()
        self.stragglers = Stragglers(console)
        self._steps: deque[float] = deque(maxlen=21)
        self._first = self._begun = ACTIVITY.steps  # no step has begun under this watch
        self._begun_at = time.monotonic()
        self._seen: tuple[object, ...] = ()
        self._statuses: list[RankStatus] = []
        self._states: list[tuple[str, str]] = []
        self._states_at = 0.0
        self._io = self._io_at = 0.0
        self._looked_at = self._resumed_at = time.monotonic()
        self._open = True
        self._poll = select.poll()
        self._woken, self._wake = os.pipe()
        self._poll.register(self._woken, select.POLLIN)
        self._ends = [self._woken, self._wake, *self._descriptors()]
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Publish the state of this rank, and start the thread."""
        ACTIVITY.publish, ACTIVITY.stop_watching, ACTIVITY.is_watched = self.publish, self.close, True
        self.publish()
        self._look_at_self(time.monotonic())
        self._thread.start()

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        os.write(self._wake, b"\0")
        if ACTIVITY.publish == self.publish:
            ACTIVITY.publish = ACTIVITY.stop_watching = lambda: None
            ACTIVITY.is_watched = False
        self._thread.join()
        for descriptor in self._ends:
            os.close(descriptor)
        if self.others is not None:
            self.others.close()

    def publish(self) -> None:
        """Write progress of this rank to the board."""
        self.board.show(
            self.me, time.monotonic(), ACTIVITY.beats, ACTIVITY.phase, THIS_RANK.step, THIS_RANK.doing.encode()[:63]
        )

    def _descriptors(self) -> Iterator[int]:
        """Yield a pidfd for each other process: it wakes the thread when that process exits."""
        for row, member in enumerate(self.members):
            if row != self.me:
                with suppress(OSError):
                    descriptor = os.pidfd_open(member.pid)
                    self._poll.register(descriptor, select.POLLIN)
                    yield descriptor

    def _run(self) -> None:
        while True:
            ended = self._poll.poll(POLL_S * 1000)
            if not self._open:
                return
            for descriptor, _ in ended:
                self._poll.unregister(descriptor)
            now = time.monotonic()
            if ended or now - self._states_at > STATES_S:
                self._states_at, self._states = now, [self._state(row) for row in range(len(self.members))]
            if now - self._looked_at > PAUSED_S:
                self._resumed_at = now
            self._looked_at = now
            self._look_at_self(now)
            verdict = self._verdict(now)
            if verdict is not None and self._open:
                self._end_run(verdict)

    def _look_at_self(self, now: float) -> None:
        """Publish where the main thread is. A new position, or bytes read or written, count as progress."""
        place = main_frame(on_accelerator=self.store is not None)
        seen = (THIS_RANK.step, THIS_RANK.doing, ACTIVITY.beats, ACTIVITY.phase)
        if seen != self._seen or (ACTIVITY.phase is Phase.SLOW and self._has_read_or_written(now)):
            self._seen = seen
            self.publish()
        self._time_steps(now)
        if ACTIVITY.phase is Phase.STEP:
            self.work.add(place.waits)
        limit = self.limits.of(ACTIVITY.phase, self._median())
        self._tell_enqueued(now, limit)
        share = self.work.value if self._steps else -1.0
        self.board.watch(self.me, now, limit, place.waits, share, False, place.text.encode()[:95])

    def _tell_enqueued(self, now: float, limit: float) -> None:
        """Tell the other ranks what this one has enqueued, once, when it has been still for half of what it may."""
        if self.store is None or self._told == self._seen or not 0 < limit / 2 < now - self.board.read(self.me).beat_at:
            return
        self._told = self._seen
        with suppress(RuntimeError):  # the store is gone: the run ends
            self.store.set(str(THIS_RANK.rank), json.dumps(asdict(enqueued())))

    def _name_by_enqueued(self, verdict: Verdict, statuses: Sequence[RankStatus]) -> Verdict:
        """Return the verdict on a hang in which all ranks wait, with the rank that has left a call out."""
        if self.store is None or verdict.error != HANG or not all(each.waits for each in statuses):
            return verdict
        found: dict[int, Enqueued] = {}
        with suppress(RuntimeError):
            for each in statuses:
                if self.store.check([str(each.rank)]):
                    found[each.rank] = Enqueued.load(self.store.get(str(each.rank)))
        named = left_out(found, statuses)
        if named is None:
            return verdict
        at_fault = next(each for each in statuses if each.rank == named[0])
        text = f"{at_fault.name} hangs in step {at_fault.step}: it {named[1]}; all ranks wait for their devices"
        return replace(verdict, culprit=at_fault.rank, step=at_fault.step, message=text)

    def _time_steps(self, now: float) -> None:
        """Record the mean time of the steps that have ended since the last look."""
        begun = ACTIVITY.steps
        if begun == self._begun:
            if self._begun == self._first:
                self._begun_at = now
            return
        ended = begun - max(self._begun, self._first + 1)
        if ended:
            self._steps.append((now - self._begun_at) / ended)
        self._begun, self._begun_at = begun, now

    def _has_read_or_written(self, now: float) -> bool:
        if now - self._io_at < 1.0:
            return False
        self._io_at = now
        try:
            lines = Path("/proc/self/io").read_text().split()
            count = float(lines[1]) + float(lines[3])
        except (OSError, IndexError, ValueError):
            return False
        grown, self._io = count - self._io > IO_BYTES, count
        return grown

    def _verdict(self, now: float) -> Verdict | None:
        """Return why the run must end. Only the judging rank looks; the others read its verdict from the board."""
        if text := self.board.verdict:
            return Verdict.load(text)
        statuses = [self._status(row, now) for row in range(len(self.members))]
        judge = next(
            (row for row, each in enumerate(statuses) if not each.is_gone and each.unwatched < FRESH_S), self.me
        )
        if judge != self.me:
            return None
        others, is_whole = self.others, True
        if others is not None:
            others.show(statuses)
            if (told := others.verdict()) is not None:
                self._statuses = statuses
                return told
            is_whole = others.is_whole
            compares = THIS_RANK.rank == 0 and self.stragglers.is_due(now)
            if is_whole and others.is_well(statuses, now) and not compares:
                return None
            statuses = sorted([*statuses, *others.statuses(now)], key=lambda each: each.rank)
        self._statuses = statuses
        verdict = diagnose(statuses, is_whole=is_whole)
        if verdict is not None:
            verdict = self._name_by_enqueued(verdict, statuses)
        if verdict is None and THIS_RANK.rank == 0:
            self.stragglers.look(statuses, now)
        return verdict

    def _state(self, row: int) -> tuple[str, str]:
        """Return the /proc state letter of a rank's process, empty if it is gone, and how it ended."""
        if row == self.me:
            return "R", ""
        member, status = self.members[row], None
        with suppress(OSError):
            status = status_of(member.pid)
        is_same = status is not None and status.started == member.started
        return (status.state, status.ending) if status is not None and is_same else ("", "")

    def _status(self, row: int, now: float) -> RankStatus:
        member, shown = self.members[row], self.board.read(row)
        state, ending = self._states[row]
        # A stopped process makes no progress in any phase, so the short limit of a step holds.
        limit = self.limits.of(Phase.STEP, self._median() or 0.0) if state == "T" else shown.limit
        return RankStatus(
            rank=member.rank,
            stage=member.stage,
            host=member.host,
            pid=member.pid,
            phase=shown.phase,
            step=shown.step,
            beats=shown.beats,
            doing=shown.doing,
            still=now - max(shown.beat_at, self._resumed_at),
            unwatched=now - max(shown.looked_at, self._resumed_at),
            silent=0.0,
            limit=limit,
            state=state,
            ending=ending,
            waits=shown.waits,
            place=shown.place,
            work=shown.work,
        )

    def _median(self) -> float | None:
        """Return the median time of the latest steps in seconds; None before the first has ended."""
        return statistics.median(self._steps) if self._steps else None

    def _end_run(self, verdict: Verdict) -> None:
        """End this process; the judging rank also ends the other ranks of its host."""
        signals.say_nothing()
        path, judges = stacks_file(self.output_dir, verdict.step), not self.board.verdict
        if judges:
            if self.others is None or self.others.claim(verdict):
                announce(verdict, self._statuses, path, self.console)
            self.board.verdict = verdict.dump()
        if verdict.error == HANG:
            append_stacks(path)
            if self.store is not None and (record := flight_record()):
                with suppress(OSError):
                    path.with_suffix(f".nccl_{THIS_RANK.rank}").write_bytes(record)
        self.board.watch(self.me, time.monotonic(), 0.0, False, -1.0, True, b"")
        rows = [row for row in range(len(self.members)) if row != self.me]
        until = time.monotonic() + WRITING_S
        while time.monotonic() < until and not all(map(self._is_ready, rows)):
            time.sleep(POLL_S / 2)
        for row in rows if judges else []:
            if not self.board.read(row).ready:
                self._kill(row)
        if self.others is not None:
            time.sleep(TELLING_S)
        if self.store is not None:
            aborting = threading.Thread(target=abort_groups, daemon=True)
            aborting.start()
            aborting.join(ABORTING_S)
        os._exit(1)

    def _is_ready(self, row: int) -> bool:
        """Whether a rank of this host has written its stacks, or cannot."""
        return self.board.read(row).ready or self._state(row)[0] in ("", "Z", "T")

    def _kill(self, row: int) -> None:
        """Kill another rank of this host. SIGKILL also ends a stopped process."""
        member = self.members[row]
        with suppress(OSError):
            status = status_of(member.pid)
            if status is not None and status.started == member.started:
                os.kill(member.pid, signal.SIGKILL)


NAMESPACES = ("pid", "net", "mnt")  # ranks in different namespaces cannot see or signal each other's processes
SHARE_OF_TIMEOUT = 0.8


def watch_run(
    args: TrainingArguments, groups: Groups, console: Console, *, on_accelerator: bool = False
) -> Watcher | None:
    """Start to watch the ranks of a run; a collective. Ends the watch of an earlier run of this process.

    Returns:
        The running watcher; None on a system without /proc.
    """
    ACTIVITY.stop_watching()
    status = status_of(os.getpid())
    if any_rank(status is None):
        return None
    assert status is not None
    here = values_beside(_view(), _myself(groups, status.started))
    board, name = _shared_board(list(here.values), groups.rank)
    others = OtherHosts(shared_store(), here.number, here.hosts, name) if here.hosts > 1 else None
    store = None
    if on_accelerator:
        count_transfers()
        own: dist.Store = shared_store().clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        store = dist.PrefixStore(f"enqueued/{name}", own)
    watcher = Watcher(
        board,
        list(here.values.values()),
        list(here.values).index(groups.rank),
        Limits(hang=args.hang_seconds, longest=SHARE_OF_TIMEOUT * run_timeout().total_seconds()),
        console,
        Path(args.output_dir).absolute(),
        others,
        store,
    )
    watcher.start()
    dist.barrier()  # each rank has written its row before any rank judges by it
    return watcher


def _view() -> str:
    """Return what is equal on ranks that see each other's processes."""
    return " ".join([host_id(), *(str(Path(f"/proc/self/ns/{name}").readlink()) for name in NAMESPACES)])


def _myself(groups: Groups, started: int) -> Member:
    return Member(
        rank=groups.rank,
        stage=groups.coordinate.stage,
        host=THIS_RANK.host,
        pid=os.getpid(),
        started=started,
    )


def _shared_board(ranks: list[int], rank: int) -> tuple[Board, str]:
    """Return the board of this host's ranks, and a name of the run that no other run has."""
    folder = Path(tempfile.mkdtemp(prefix="ds-harness-watch-")) if ranks[0] == rank else None
    shared, of_run = values_beside(_view(), folder).values[ranks[0]], value_of_first(folder)
    assert shared is not None and of_run is not None
    board = Board(shared / "board", len(ranks))
    dist.barrier()
    if folder is not None:
        (folder / "board").unlink()
        folder.rmdir()
    return board, of_run.name
