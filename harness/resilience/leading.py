"""What the leader of a run does for all hosts: it plans each start, and judges it when it is over.

In the engine each agent restarts by itself, at once, a number of times, whatever the cause. Here the agent with number
0 in the rendezvous is the leader. What must outlive it is in the store, where the next leader finds it: the history of
the run, and the team of a start that has not been judged.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from harness.atomic import open_no_link
from harness.checkpoint.directories import RESTARTS
from harness.config.values.secrets import Secrets
from harness.console import print_if_heard
from harness.errors import UserError
from harness.resilience.judging import History, Verdict, judge
from harness.resilience.options import Options
from harness.resilience.reports import Report, cause_of
from harness.resilience.script import Script
from harness.resilience.team import Offer, Team, team_of
from harness.topology.env import LOOPBACK
from harness.topology.signed_store import SignedStore

ANSWER_S = 10.0  # an agent that does not report how its ranks ended within this time is lost
HOSTS_S = 1800.0  # longest wait for missing hosts
LOOK_S = 0.05
LONGEST_S = 60.0  # of a pause in which the other agents wait for a plan


class Leader:
    """Decides which hosts take part in each start, and what follows when it ends.

    Args:
        devices: number of devices of this host.
        pause: waits for some seconds, and handles signals and messages of the starter meanwhile.
        received: signals to the launch of this agent.
        known: the history of the run, as this agent or an earlier one of the same launch has last seen it.
    """

    def __init__(
        self,
        devices: int,
        options: Options,
        script: Script,
        store: SignedStore,
        pause: Callable[[float], None],
        received: Sequence[int],
        known: History,
    ) -> None:
        self.options = options
        self.script = script
        self.store = store
        self.known = known
        self._devices = devices
        self._wanted = options.wanted or devices * options.nodes[1]
        self._pause = pause
        self._received = received
        self.team = Team(offers=())  # the hosts of the current start
        self.grows = False  # whether its ranks were told to save and stop because further hosts are there
        self._waits_since = 0.0  # since when there are too few hosts; 0 if there are enough
        least, most = options.nodes
        self._may_wait = least < most or bool(options.max_restarts)
        self._fewest = options.min_ranks or (1 if self._may_wait else self._wanted)

    @property
    def history(self) -> History:
        """The history of the run: from the store, because another agent may have led; else as known here."""
        if self.store.check(["history"]):
            self.known = self.store.take("history", History)
        return self.known

    def plan(self, offers: Sequence[Offer], meeting: SignedStore) -> Verdict | None:
        """Write what each host starts into the store of the meeting.

        Returns a verdict that ends the run instead, if no layout fits or the last start has used up the restarts.
        """
        if not self.store.check(["history"]):
            known = [offer.history for offer in offers if offer.history is not None]
            self._write(replace(max(known, key=lambda each: each.start, default=History()), is_open=False))
        if (history := self.history).is_open:  # its leader was lost
            self.team = self.store.take(f"{history.start}/team", Team)
            self.store.compare_set(f"{history.start}/over", "", "fault")
            absent = {offer.node for offer in self.team.offers} - {offer.node for offer in offers}
            verdict = self.judge(absent, "", ANSWER_S)
            self._pause(min(verdict.pause, LONGEST_S))
            if verdict.code is not None:
                return verdict
            history = self.history
        try:
            team = team_of(offers, history.failing, self.script, self._wanted, self._fewest)
        except UserError as error:
            return self.publish(Verdict(code=1, lines=(str(error),)), history)
        if (problem := self._problem(team)) is not None:
            return problem
        number = history.start + 1
        start = team.start
        if number == 0:
            history = replace(history, earlier=self.script.earlier)
        elif start is not None:
            self.script.earlier = history.earlier
            start = self.script.again(start)
        self.team = team
        self.grows = False
        several = len([offer for offer in team.offers if offer.devices]) > 1
        first = team.offers[0]
        address = self.options.master_addr or (first.address if several else LOOPBACK)
        plan = {"start": number, "hosts": len(team.offers), "address": address, "port": first.port}
        plan |= {"words": start.words if start else (), "ranks": start.ranks if start else 0}
        self.store.set(f"{number}/over", "")
        self.store.put(f"{number}/signal", 0)
        self.store.put(f"{number}/team", team)
        self._write(replace(history, start=number, is_open=start is not None, gone=()))
        rank = 0
        for index, offer in enumerate(team.offers):
            meeting.put(f"plan/{offer.node}", {"index": index, "first": rank, "devices": offer.devices})
            rank += len(offer.devices)
        meeting.put("plan", plan)
        return None

    def leave_out(self, lost: Sequence[str]) -> None:
        """Have the next rendezvous leave out agents that were lost before they took part in a start."""
        self._write(replace(self.history, gone=(*self.known.gone, *lost)))

    def _problem(self, team: Team) -> Verdict | None:
        """Tell the user if no layout fits the hosts. Returns a verdict that ends the run if no others may come."""
        missing = self.store.get("missing").decode() if self.store.check(["missing"]) else ""
        if team.start is not None:
            self._waits_since = 0.0
            if missing:
                self.say(f"no answer from {missing}: going on without")
            return None
        problem = f"no answer from {missing}" if missing else f"{team.available} of {self._wanted} devices are left"
        now = time.monotonic()
        may_come = self._may_wait and (bool(missing) or len(team.offers) < self.options.nodes[1])
        if not may_come or (self._waits_since and now - self._waits_since > HOSTS_S):
            text = f"{problem}, and no layout of at least {self._fewest} ranks fits what is left"
            return self.publish(Verdict(code=1, lines=(text,)), self.history)
        if not self._waits_since:
            self._waits_since = now
            self.say(f"{problem}: waiting for at least {self._fewest} ranks")
        return None

    def would_grow(self, waiting: int) -> bool:
        """Return whether more ranks could be used if the waiting hosts had as many devices as this one."""
        used = sum(len(offer.devices) for offer in self.team.offers)
        most = min(self._wanted, used + waiting * self._devices)
        better = self.script.first(most) if most == self._wanted else self.script.on_fewer(self._wanted, most)
        return better is not None and better.ranks > used

    def judge(self, lost: set[str], text: str, seconds: float) -> Verdict:
        """Judge the last start, waiting some seconds for the reports of its hosts; tell all agents the verdict.

        `lost` are agents that will not report, `text` is an error of an agent itself; empty if a rank has failed.
        """
        history, team = self.history, self.team
        if not any(offer.devices for offer in team.offers):
            return self.publish(Verdict(), replace(history, is_open=False, gone=tuple(sorted(lost))))
        reports = self._reports(history.start, lost, seconds)
        lost |= {offer.node for index, offer in enumerate(team.offers) if offer.devices and index not in reports}
        received = [*(report.received for report in reports.values() if report.received), *self._received]
        leaving = {team.offers[index].node for index, report in reports.items() if report.received}
        step = self.store.take("step", int) if self.store.check(["step"]) else 0
        cause = cause_of(team, reports, lost, text, step)
        goes_on = ""
        if self.grows:
            goes_on = "a host is back: going on with all hosts that answer"
        elif received and self._can_spare(lost | leaving):
            names = ", ".join(offer.host for offer in team.offers if offer.node in leaving)
            goes_on = f"going on without {names}, which was told to stop"
        most = self.options.max_restarts
        leaves_out = bool(self.options.min_ranks)
        first = [*received, 0][0]
        verdict, judged = judge(history, cause, most=most, leaves_out=leaves_out, received=first, goes_on=goes_on)
        folder = self.script.output_dir
        if cause is not None and len(judged.faults) > len(history.faults) and folder is not None and folder.is_dir():
            line = {"time": time.time(), "step": cause.step, "cause": cause.text, "start": str(team.start)}
            text = json.dumps(Secrets.known().without(line))
            with suppress(OSError), open(folder / RESTARTS, "a", encoding="utf-8", opener=open_no_link) as file:
                file.write(text + "\n")
        return self.publish(verdict, replace(judged, gone=tuple(sorted(lost | leaving))))

    def _reports(self, number: int, lost: set[str], seconds: float) -> dict[int, Report]:
        """Return the reports that arrive within some seconds, by the host's place in the team."""
        reports: dict[int, Report] = {}
        offers = enumerate(self.team.offers)
        wanted = {index for index, offer in offers if offer.devices and offer.node not in lost}
        until = time.monotonic() + seconds
        while (missing := wanted - reports.keys()) and time.monotonic() < until:
            for index in missing:
                if self.store.check([f"{number}/ended/{index}"]):
                    reports[index] = self.store.take(f"{number}/ended/{index}", Report)
            if wanted - reports.keys():
                self._pause(LOOK_S)
        return reports

    def _can_spare(self, leaving: set[str]) -> bool:
        """Return whether the run can go on without these agents: enough stay, and none of these serves the store."""
        left = [offer.node for offer in self.team.offers if offer.node not in leaving]
        server = self.store.get("server").decode() if self.store.check(["server"]) else ""
        least, most = self.options.nodes
        return least < most and len(left) >= least and (not server or server in left)

    def publish(self, verdict: Verdict, history: History) -> Verdict:
        """Tell the user and all agents the verdict on the current start; return it."""
        for line in verdict.lines:
            self.say(line)
        self._write(history)
        if verdict.code is not None:
            self.store.put("end", verdict.code)
        self.store.put(f"{history.start}/verdict", verdict)
        return verdict

    def _write(self, history: History) -> None:
        self.known = history
        self.store.put("history", history)

    def say(self, text: str) -> None:
        """Print a line for the user."""
        print_if_heard(f"{self.options.command}: {text}", sys.stderr)
