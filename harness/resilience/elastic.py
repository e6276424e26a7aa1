"""The agent of a host: torch's elastic agent, with its own diagnosis and decisions.

The engine's loop is unchanged: rendezvous, give each worker its rank, start the workers, monitor them, and begin again.
In between the agents exchange messages in the store, under keys that begin with the number of the start:

    plan, plan/NODE   what to start, and the ranks of a host; written by the leader, in the store of this rendezvous
    over              empty, then why the start is over; written by the first agent that sees it
    signal            "0", then a signal for the ranks of all hosts
    ended/I           how the ranks of the team's host I have ended
    verdict           what the agents do next; written by the leader
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource

from harness.config.values.json_object import JsonObject
from harness.resilience.cause import oom_kills
from harness.resilience.judging import History, Verdict
from harness.resilience.leading import ANSWER_S, HOSTS_S, LOOK_S, Leader
from harness.resilience.on_host.ranks import Ranks
from harness.resilience.options import TRAIN, Options
from harness.resilience.process.records import read_positions
from harness.resilience.rendezvous import AGAIN_S, HEARTBEAT_S, LAST_CALL_S, Heartbeat, Rendezvous
from harness.resilience.reports import BY_SIGNAL, ENDS, Report, have_reported, why_over
from harness.resilience.script import Script
from harness.resilience.team import LOST, Offer
from harness.topology.env import free_port, inherited
from harness.topology.signed_store import SignedStore, not_of_this_run

DEVICES = "CUDA_VISIBLE_DEVICES"
NEWS_S = 0.2  # interval at which the store is read
PLAN_S = 120.0  # a leader that plans no start within this time is lost
LEAVE_S = 10.0  # an agent whose launch serves the store waits this long for the others to read the last verdict
SIGNAL_S = 1.0  # Slurm and Kubernetes signal ranks and agent in any order: time for the agent to get its own


class Agent(LocalElasticAgent):
    """The agent of one host. `run` ends by SystemExit, with the exit code of the launch or with LOST.

    Args:
        name: of this agent, as `Rendezvous` takes it.
        store: of the agents of this run.
        look: checks the ranks and reads messages of the starter; called several times a second.
        received: signals to the launch.
        history: of the run, as known to an earlier agent of this launch.
        serves: whether the store ends with this launch.
    """

    def __init__(
        self,
        offer: Offer,
        name: tuple[str, int, int],
        options: Options,
        script: Script,
        ranks: Ranks,
        store: SignedStore,
        look: Callable[[], None],
        received: list[int],
        history: History | None = None,
        *,
        serves: bool = False,
    ) -> None:
        self.offer = offer
        self.options = options
        self.ranks = ranks
        self._look = look
        self._received = received
        self._serves = serves
        self.store = store
        self.handler = Rendezvous(store, options, name, self._wait_for_others)
        self.heartbeat = Heartbeat(self.store, self.handler.node)
        devices = len(offer.devices)
        known = history or History()
        self.leader = Leader(devices, options, script, self.store, self._pause, received, known)
        self._leads = False
        self._plan: JsonObject = {}  # what the leader has planned for this host
        self._number = -1  # of the start
        self._hosts = 0  # number of agents that take part
        self._passed = 0  # number of received signals that were passed on to the ranks
        self._joins = True
        self._joins_since = time.monotonic()
        self._signalled = self._finished = False
        self._kills = oom_kills()
        if serves:
            self.store.set("server", self.handler.node)
        spec = WorkerSpec(
            role="rank",
            local_world_size=max(len(offer.devices), 1),
            rdzv_handler=self.handler,
            entrypoint=script.words[0],
            max_restarts=sys.maxsize,  # the leader counts
            monitor_interval=LOOK_S,
            event_log_handler="null",
        )
        super().__init__(spec, None)  # type: ignore[arg-type]  # no logs: ranks write their own

    def _assign_worker_ranks(
        self,
        store: SignedStore,
        group_rank: int,
        group_world_size: int,
        spec: WorkerSpec,  # noqa: ARG002
    ) -> list[Worker]:
        """Exchange what the hosts have and what they start; return the ranks of this host."""
        self._joins = False
        self._leads = group_rank == 0
        self._hosts = group_world_size
        history = None if self.store.check(["history"]) else self.leader.known
        port = self.options.master_port or free_port()
        store.put(f"offer/{group_rank}", replace(self.offer, node=self.handler.node, port=port, history=history))
        if self._leads:
            keys = [f"offer/{rank}" for rank in range(group_world_size)]
            self._await(store, keys)
            if not self.handler.takes_part():
                raise SystemExit(LOST)  # this agent was stopped, and another one leads
            if (verdict := self.leader.plan([store.take(key, Offer) for key in keys], store)) is not None:
                self._leave(verdict.code or 0)
        self._await(store, ["plan", own := f"plan/{self.handler.node}"])
        self._plan = {**store.take("plan", dict), **store.take(own, dict)}
        self._number = self._plan["start"]
        self._signalled = False
        self._finished = False
        first = self._plan["first"]
        total = self._plan["ranks"]
        here = range(len(self._plan["devices"]))
        return [Worker(local, first + local, first + local, total, total) for local in here]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Start the ranks of this host."""
        plan = self._plan
        options = self.options
        size = str(len(worker_group.workers))
        common = {
            "MASTER_ADDR": plan["address"],
            "MASTER_PORT": str(plan["port"]),
            "WORLD_SIZE": str(plan["ranks"]),
            "CROSS_SIZE": str(plan["hosts"]),
            "CROSS_RANK": str(plan["index"]),
            "LOCAL_WORLD_SIZE": size,
            "LOCAL_SIZE": size,
        }
        devices: list[int] = plan["devices"]
        if devices != list(range(len(devices))):
            visible = inherited().get(DEVICES, "").split(",")  # a starter may have chosen among those of the host
            common[DEVICES] = ",".join(visible[each] if each < len(visible) > 1 else str(each) for each in devices)
        script, *arguments = plan["words"] or [""]
        how = ["-P"] * (script == TRAIN) + ["-m"] * options.module  # -P: no folder `harness` of the working directory
        python = [] if options.no_python else [sys.executable, "-u", *how]
        ranks = []
        for worker in worker_group.workers:
            numbers = {"RANK": str(worker.global_rank), "LOCAL_RANK": str(worker.local_rank)}
            local = [] if options.no_local_rank else [f"--local_rank={worker.local_rank}"]
            ranks.append((worker.global_rank, [*python, script, *local, *arguments], {**common, **numbers}))
        self._kills = oom_kills()
        try:
            self.ranks.start(self._number, ranks)
        except OSError as error:
            self._tell_over(f"fault {self.ranks.records}: cannot be made: {error.strerror}")
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # noqa: ARG002
        """Wait until the start is over, and do what the verdict says: leave, or let the engine begin again."""
        verdict = self._conclude(self._watch())
        self.ranks.end()
        if verdict.code is not None:
            self._leave(verdict.code)
        if self._received:
            self._leave(128 + self._received[0])
        self._pause(verdict.pause)
        self._joins = True
        self._joins_since = time.monotonic()
        return RunResult(state=WorkerState.FAILED)

    def _watch(self) -> str:
        """Return why the start is over, once it is."""
        begun = news = checked = time.monotonic()
        while True:
            self._pause(LOOK_S)
            if why := self._over_here():
                self._tell_over(why)
            now = time.monotonic()
            if now - news < NEWS_S and not why:
                continue
            news = now
            if over := self.store.get(f"{self._number}/over").decode():
                return over
            if self._received and not self._plan["ranks"]:
                self._leave(128 + self._received[0])
            number = self.store.take(f"{self._number}/signal", int)
            if number and not self._signalled and not self._received:
                self._signalled = True
                self.ranks.signal(number)
            if self._leads and now - checked > HEARTBEAT_S:
                checked = now
                self._look_at_hosts(now - begun)

    def _look_at_hosts(self, waited: float) -> None:
        """End the start if an agent is lost; have the ranks save and stop if further hosts make a better layout."""
        positions = read_positions(self.ranks.records)
        self.store.put("step", max((each.step for each in positions.values()), default=0))
        waiting = set(self.handler.waiting())
        nodes = {offer.node for offer in self.leader.team.offers}
        silent = set(self.heartbeat.lost([*nodes, *waiting]))
        waiting -= silent
        replaced = nodes - set(self.handler.participants())  # by another launch of the same host
        if lost := replaced | (silent & nodes):
            self._tell_over(f"hosts {' '.join(sorted(lost))}")
            return
        if not self._plan["ranks"]:
            if waiting or waited > HOSTS_S:
                self._tell_over("hosts")
        elif waiting and positions and not self.leader.grows and self.leader.would_grow(len(waiting)):
            self.leader.grows = True
            self.store.put(f"{self._number}/signal", int(signal.SIGUSR1))

    def _over_here(self) -> str:
        """Return why the start is over, by the ranks of this host; empty while it is not."""
        why = why_over(self.ranks.records, self.ranks.exits, self.ranks.count)
        if why != "finished":
            return why
        if self._finished:
            return ""
        self._finished = True
        ended = self.store.add(f"{self._number}/finished", self.ranks.count)
        return "done" if ended == self._plan["ranks"] else ""  # else rank 0 may be exporting, on another host

    def _tell_over(self, why: str) -> None:
        self.store.compare_set(f"{self._number}/over", "", why)

    def _conclude(self, over: str) -> Verdict:
        """Report how the ranks of this host ended; return the leader's verdict."""
        why, _, detail = over.partition(" ")
        if why not in ENDS:
            raise not_of_this_run(f"{self._number}/over")
        ranks = self.ranks
        seen = time.time()
        begun = time.monotonic()
        while not have_reported(ranks.records, ranks.exits, ranks.count, why, time.monotonic() - begun):
            self._pause(LOOK_S)
        if any(code in BY_SIGNAL for _, code, _ in ranks.exits):
            self._pause(SIGNAL_S)
        if ranks.count:
            report = Report.of(ranks.records, ranks.exits, seen, self._kills, self._received)
            self.store.put(f"{self._number}/ended/{self._plan['index']}", report)
        ranks.end()
        if self.leader.history.start > self._number:
            raise SystemExit(LOST)  # the others went on without this host, which was stopped: it joins as a new agent
        if self._leads:
            lost = set(detail.split()) if why == "hosts" else set()
            error = detail if why == "fault" else ""
            return self.leader.judge(lost, error, ENDS[why] + ANSWER_S)
        key = f"{self._number}/verdict"
        until = time.monotonic() + ENDS[why] + 2 * ANSWER_S
        while not self.store.check([key]):
            if time.monotonic() > until:
                return Verdict()  # the leader is lost: the next leader judges this start
            self._pause(NEWS_S)
        verdict = self.store.take(key, Verdict)
        for line in () if self.options.started else verdict.lines:
            self.leader.say(line)
        if self.handler.node in self.leader.history.gone and verdict.code is None and not self._received:
            raise SystemExit(LOST)  # the others have counted this host as lost
        return verdict

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        """Return an empty event: nobody reads it, and torch's own looks up this host's name in the DNS each time."""
        return Event(state, source)

    def _wait_for_others(self) -> None:
        """Handle signals, lost hosts and the end of the run while the rendezvous waits, which calls this often."""
        if not self._joins:
            return
        self._tick()
        if self._received:
            self._leave(128 + self._received[0])
        if self.store.check(["end"]):
            raise SystemExit(self.store.take("end", int))
        holder = self.handler.holder
        history = self.leader.history
        if self.handler.node in history.gone:
            raise SystemExit(LOST)  # the others leave this name out: it was stopped, and counted as lost
        here = self.handler.participants()
        waited = time.monotonic() - self._joins_since
        if self.handler.node in here and waited > HOSTS_S:
            least = self.options.nodes[0]
            self.leader.say(f"only {len(here)} of at least {least} hosts joined within {waited / 60:.0f} minutes")
            self._leave(1)
        gone = set(history.gone)
        number = sorted({*here, self.handler.node}).index(self.handler.node)
        if waited > AGAIN_S * (1 + number):  # one after another: thousands of agents would ask for all others
            gone |= set(self.heartbeat.lost(here))
        holder.gone = frozenset(gone)
        holder.last_call = AGAIN_S if history.start >= 0 else LAST_CALL_S
        if self.store.check(["expected"]):
            holder.expected = self.store.take("expected", int)

    def _leave(self, code: int) -> None:
        """Leave with an exit code. If the store ends with this launch, first let the others read the verdict."""
        until = time.monotonic() + LEAVE_S
        self.store.add("left", 1)
        while self._serves and self.store.add("left", 0) < self._hosts and time.monotonic() < until:
            self._pause(LOOK_S)
        raise SystemExit(code)

    def _await(self, store: SignedStore, keys: list[str]) -> None:
        """Wait for keys in the store of this rendezvous. Leaves as LOST if an agent that should set one is lost."""
        begun = checked = time.monotonic()
        while not store.check(keys):
            if self.store.check(["end"]):
                self._leave(self.store.take("end", int))
            now = time.monotonic()
            if now - checked > HEARTBEAT_S:
                checked = now
                agents = self.handler.participants()
                lost = self.heartbeat.lost(agents if self._leads else agents[:1])
                if self._leads and lost:
                    self.leader.leave_out(lost)
                    store.set("again", "")
                if lost or store.check(["again"]) or now - begun > PLAN_S:
                    raise SystemExit(LOST)
            self._pause(LOOK_S)

    def _pause(self, seconds: float) -> None:
        """Wait, and handle signals and the ranks meanwhile. A signal to this launch ends a longer wait."""
        until = time.monotonic() + seconds
        while True:
            time.sleep(min(seconds, LOOK_S))
            self._tick()
            if self._received or time.monotonic() >= until:
                return

    def _tick(self) -> None:
        """Check the ranks and the starter's messages, and pass signals on."""
        self._look()
        for number in self._received[self._passed :]:
            self.ranks.signal(number)
            self._passed += 1  # not all that have come: another one may come meanwhile
