"""A thread on each rank that shows the rank's progress to the others, and ends a run that cannot go on.

The lowest rank of a host whose thread runs judges all ranks of the host; if it is dead or stopped, the next one does.
The threads run while the main threads wait in a collective or loop in Python.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from harness.arguments import TrainingArguments
from harness.atomic import replaced_files
from harness.console import Console
from harness.device.process_group import shared_store
from harness.errors import UserError
from harness.resilience.process import signals
from harness.resilience.process.activity import ACTIVITY, SHOWN, Phase
from harness.resilience.process.records import HANG, THIS_RANK
from harness.resilience.watch.board import Board
from harness.resilience.watch.diagnosis import FRESH_S, Diagnosis, RankStatus, diagnose
from harness.resilience.watch.ending import announce, append_stacks, main_frame
from harness.resilience.watch.enqueued import Enqueued, abort_groups, count_transfers, enqueued, flight_record, left_out
from harness.resilience.watch.hosts import OtherHosts
from harness.resilience.watch.stragglers import SAMPLES, Stragglers, share_of_work
from harness.topology.agreement import all_gather_on_host, any_rank, broadcast_object, host_group
from harness.topology.env import run_timeout
from harness.topology.groups import Groups
from harness.topology.hosts import host_id
from harness.topology.process_status import status_of
from harness.topology.signed_store import SignedStore

POLL_S = 0.2
STATES_S = 1.0  # interval of reads of process states in /proc; the exit of a process wakes the thread at once
PAUSED_S = 5.0  # if this thread has not run for this long, the whole host may have slept: times start anew
SLOW_S = 600.0  # limit without progress outside of steps, and in the first step, which may compile
MEDIANS = 5.0  # limit within a step, in medians of the latest steps' times
IO_BYTES = 2**20  # reading or writing so much counts as progress outside of steps
WRITING_S = 3.0  # time for the ranks of a host to write their stacks
ABORTING_S = 3.0  # time for NCCL to end its kernels
TELLING_S = 2.5  # time for other hosts to read the verdict from the store, whose server ends with rank 0
NAMESPACES = ("pid", "net", "mnt")  # ranks in different namespaces cannot see or signal each other's processes
SHARE_OF_TIMEOUT = 0.8


class WatchedRank(NamedTuple):
    """What all ranks know of a rank."""

    rank: int
    stage: int
    host: str
    pid: int
    started: int  # start time of the process, which tells it from a later one with the same pid


class Limits(NamedTuple):
    """Limits of the seconds without progress."""

    hang: float  # the least limit in a step (`--hang_seconds`); 0 turns the search for hangs off
    longest: float  # below the timeout of a collective, because its error would not name the rank at fault

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
        members: list[WatchedRank],
        me: int,
        limits: Limits,
        console: Console,
        output_dir: Path,
        others: OtherHosts | None = None,
        store: SignedStore | None = None,
    ) -> None:
        self.board = board
        self._row = board.row(me)
        self.members = members
        self.me = me
        self.limits = limits
        self.console = console
        self.output_dir = output_dir
        self.others = others
        self.store = store
        self.stragglers = Stragglers(console)
        self._works: deque[bool] = deque(maxlen=SAMPLES)  # whether this rank worked, in each sample of a step
        self._steps: deque[float] = deque(maxlen=21)  # seconds of the latest steps
        self._step_seconds: float | None = None  # their median; None before the first has ended
        self._first = self._begun = ACTIVITY.steps  # no step has begun under this watch
        self._seen: tuple[object, ...] = ()
        self._told: tuple[object, ...] = ()
        self._statuses: list[RankStatus] = []
        self._states: list[tuple[str, str]] = []
        self._states_at = self._io = self._io_at = 0.0
        self._begun_at = self._looked_at = self._resumed_at = time.monotonic()
        self._open = True
        self._woken, self._wake = os.pipe()
        self._ends = [self._woken, self._wake]
        for row, member in enumerate(members):
            if row != me:
                with suppress(OSError):
                    self._ends.append(os.pidfd_open(member.pid))  # wakes the thread when that process exits
        self._poll = select.poll()
        for descriptor in self._ends:
            if descriptor != self._wake:
                self._poll.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Show the state of this rank on the board, and start the thread."""
        ACTIVITY.row = self._row
        ACTIVITY.stop_watching = self.close
        ACTIVITY.is_watched = True
        ACTIVITY.show()
        self._look_at_self(time.monotonic())
        self._thread.start()

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        os.write(self._wake, b"\0")
        if ACTIVITY.row is self._row:
            ACTIVITY.row = bytearray(SHOWN.size)
            ACTIVITY.stop_watching = lambda: None
            ACTIVITY.is_watched = False
        self._thread.join()
        for descriptor in self._ends:
            os.close(descriptor)
        if self.others is not None:
            self.others.close()

    def _run(self) -> None:
        while True:
            ended = self._poll.poll(POLL_S * 1000)
            if not self._open:
                return
            for descriptor, _ in ended:
                self._poll.unregister(descriptor)
            now = time.monotonic()
            if ended or now - self._states_at > STATES_S:
                self._states_at = now
                self._states = [self._state(row) for row in range(len(self.members))]
            if now - self._looked_at > PAUSED_S:
                self._resumed_at = now
            self._looked_at = now
            self._look_at_self(now)
            if (verdict := self._verdict(now)) is not None and self._open:
                self._end_run(verdict)

    def _look_at_self(self, now: float) -> None:
        """Show where the main thread is. A new position, or bytes read or written, count as progress."""
        place = main_frame(on_accelerator=self.store is not None)
        seen = (THIS_RANK.step, THIS_RANK.doing, ACTIVITY.beats, ACTIVITY.phase)
        if seen != self._seen or (ACTIVITY.phase is Phase.SLOW and self._has_read_or_written(now)):
            self._seen = seen
            ACTIVITY.show()
        self._time_steps(now)
        if ACTIVITY.phase is Phase.STEP:
            self._works.append(not place.waits)
        limit = self.limits.of(ACTIVITY.phase, self._step_seconds)
        self._tell_enqueued(now, limit)
        share = share_of_work(self._works) if self._steps else -1.0
        self.board.watch(self.me, now, limit, place.waits, share, False, place.text.encode()[:95])

    def _tell_enqueued(self, now: float, limit: float) -> None:
        """Tell the other ranks what this one has enqueued, once, after half of its time without progress."""
        if self.store is None or self._told == self._seen or not 0 < limit / 2 < now - self.board.read(self.me).beat_at:
            return
        self._told = self._seen
        with suppress(RuntimeError):  # the store is gone: the run ends
            self.store.put(str(THIS_RANK.rank), enqueued())

    def _name_by_enqueued(self, verdict: Diagnosis, statuses: Sequence[RankStatus]) -> Diagnosis:
        """Complete the verdict on a hang in which all ranks wait: name the rank that skipped a collective."""
        if self.store is None or verdict.error != HANG or not all(each.waits for each in statuses):
            return verdict
        found = {}
        with suppress(RuntimeError, UserError):  # the store is gone, or the message is of a stranger
            for each in statuses:
                if self.store.check([str(each.rank)]):
                    found[each.rank] = self.store.take(str(each.rank), Enqueued)
        if (named := left_out(found, statuses)) is None:
            return verdict
        at_fault = next(each for each in statuses if each.rank == named[0])
        text = f"{at_fault.name} hangs in step {at_fault.step}: it {named[1]}; all ranks wait for their devices"
        return replace(verdict, culprit=at_fault.rank, step=at_fault.step, message=text)

    def _time_steps(self, now: float) -> None:
        """Record the mean time of the steps that have ended since the last call."""
        begun = ACTIVITY.steps
        if begun == self._begun:
            if self._begun == self._first:
                self._begun_at = now
            return
        ended = begun - max(self._begun, self._first + 1)
        if ended:
            self._steps.append((now - self._begun_at) / ended)
            self._step_seconds = statistics.median(self._steps)
        self._begun = begun
        self._begun_at = now

    def _has_read_or_written(self, now: float) -> bool:
        has_grown = False
        with suppress(OSError, IndexError, ValueError):
            if now - self._io_at >= 1.0:
                self._io_at = now
                _, read, _, written, *_ = Path("/proc/self/io").read_text().split()
                has_grown = int(read) + int(written) - self._io > IO_BYTES
                self._io = int(read) + int(written)
        return has_grown

    def _verdict(self, now: float) -> Diagnosis | None:
        """Return why the run must end. One rank of each host judges; the others read its verdict from the board."""
        if text := self.board.verdict:
            return Diagnosis.load(text)
        statuses = [self._status(row, now) for row in range(len(self.members))]
        judge = next(
            (row for row, each in enumerate(statuses) if not each.is_gone and each.unwatched < FRESH_S), self.me
        )
        if judge != self.me:
            return None
        others = self.others
        is_whole = True
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
        if (verdict := diagnose(statuses, is_whole=is_whole)) is not None:
            return self._name_by_enqueued(verdict, statuses)
        if THIS_RANK.rank == 0:
            self.stragglers.look(statuses, now)
        return None

    def _state(self, row: int) -> tuple[str, str]:
        """Return the /proc state letter of a rank's process, empty if it is gone, and how it ended."""
        if row == self.me:
            return "R", ""
        member = self.members[row]
        status = None
        with suppress(OSError):
            status = status_of(member.pid)
        is_same = status is not None and status.started == member.started
        return (status.state, status.ending) if status is not None and is_same else ("", "")

    def _status(self, row: int, now: float) -> RankStatus:
        own = self.members[row]._asdict()
        shown = self.board.read(row)._asdict()
        state, ending = self._states[row]
        if state == "T":  # a stopped process makes no progress in any phase, so the short limit of a step holds
            shown["limit"] = self.limits.of(Phase.STEP, self._step_seconds or 0.0)
        still = now - max(shown.pop("beat_at"), self._resumed_at)
        unwatched = now - max(shown.pop("looked_at"), self._resumed_at)
        del own["started"], shown["ready"]
        return RankStatus(**own, **shown, still=still, unwatched=unwatched, silent=0.0, state=state, ending=ending)

    def _end_run(self, verdict: Diagnosis) -> None:
        """End this process; the judging rank also ends the other ranks of its host."""
        signals.say_nothing()
        path = self.output_dir / f"hang-{verdict.step}.txt"
        judges = not self.board.verdict
        if judges:
            if self.others is None or self.others.claim(verdict):
                announce(verdict, self._statuses, path, self.console)
            self.board.verdict = verdict.dump()
        if verdict.error == HANG:
            append_stacks(path)
            if self.store is not None and (record := flight_record()):
                with suppress(OSError), replaced_files(path.parent) as folder:
                    (folder / f"{path.stem}.nccl_{THIS_RANK.rank}").write_bytes(record)
        self.board.watch(self.me, time.monotonic(), 0.0, False, -1.0, True, b"")
        rows = [row for row in range(len(self.members)) if row != self.me]
        until = time.monotonic() + WRITING_S
        while time.monotonic() < until and not all(
            self.board.read(row).ready or self._state(row)[0] in ("", "Z", "T") for row in rows
        ):
            time.sleep(POLL_S / 2)
        for row in rows if judges else []:
            if not self.board.read(row).ready and self._state(row)[0]:
                with suppress(OSError):
                    os.kill(self.members[row].pid, signal.SIGKILL)  # which also ends a stopped process
        if self.others is not None:
            time.sleep(TELLING_S)
        if self.store is not None:
            aborting = threading.Thread(target=abort_groups, daemon=True)
            aborting.start()
            aborting.join(ABORTING_S)
        os._exit(1)


def watch_run(
    args: TrainingArguments, groups: Groups, console: Console, *, on_accelerator: bool = False
) -> Watcher | None:
    """Start to watch the ranks of a run, and return the watch; None on a system without /proc.

    A collective. Ends the watch of an earlier run of this process.
    """
    ACTIVITY.stop_watching()
    status = status_of(os.getpid())
    if any_rank(status is None):
        return None
    assert status is not None
    myself = WatchedRank(groups.rank, groups.coordinate.stage, THIS_RANK.host, os.getpid(), status.started)
    here = all_gather_on_host(_view(), myself)
    board, name = _shared_board(list(here.values), groups.rank)
    others = OtherHosts(shared_store(), here.number, here.hosts, name) if here.hosts > 1 else None
    store = None
    if on_accelerator:
        count_transfers()
        own: dist.Store = shared_store().clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        store = SignedStore(own, f"enqueued/{name}/")
    limits = Limits(hang=args.hang_seconds, longest=SHARE_OF_TIMEOUT * run_timeout().total_seconds())
    members = list(here.values.values())
    me = list(here.values).index(groups.rank)
    folder = Path(args.output_dir)
    watcher = Watcher(board, members, me, limits, console, folder.absolute(), others, store)
    watcher.start()
    dist.barrier(host_group())  # each rank has written its row before any rank judges by it
    return watcher


def _view() -> str:
    """Return a text that is equal on ranks which see each other's processes."""
    return " ".join([host_id(), *(str(Path(f"/proc/self/ns/{name}").readlink()) for name in NAMESPACES)])


def _shared_board(ranks: list[int], rank: int) -> tuple[Board, str]:
    """Return the board of this host's ranks, and a name of the run that no other run has."""
    folder = Path(tempfile.mkdtemp(prefix="ds-harness-watch-")) if ranks[0] == rank else None
    shared = all_gather_on_host(_view(), folder).values[ranks[0]]
    of_run = broadcast_object(folder)
    assert shared is not None and of_run is not None
    board = Board(shared / "board", len(ranks))
    dist.barrier(host_group())
    if folder is not None:
        (folder / "board").unlink()
        folder.rmdir()
    return board, of_run.name
