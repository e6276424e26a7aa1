"""The c10d rendezvous of torch.distributed.elastic, with its own rules for which agents are lost and how long to wait.

torch compares times that other hosts have written with its own clock, so hosts whose clocks differ by 15 seconds never
meet. And each of N agents writes its heartbeat into the state of all N. Here each agent increases a counter under a key
of its own, and others measure by their own clock when it last changed. While ranks run, only the leader reads them.

The ranks of each start meet in a store of their own. torch 2.13 gives them the store of the agents, which still has the
addresses of the last start's ranks: gloo connects to a rank that is gone ("connection refused"), or waits for it.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    Token,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousState,
)

from harness.config.values.json_object import JsonObject
from harness.console import print_if_heard
from harness.resilience.options import Options
from harness.topology.env import LOOPBACK
from harness.topology.signed_store import SignedStore, not_of_this_run

HEARTBEAT_S = 2.0
LOST_S = 20.0  # an agent whose counter has not changed for this long is lost; packet loss can delay it by seconds
PAUSED_S = 10.0  # after a longer gap between two checks this process or the store was stopped: times start anew
LAST_CALL_S = 30.0  # wait for further hosts before the first start
AGAIN_S = 5.0  # the same before later ones: hosts that are there come at once
JOIN_S = 10 * 365 * 86400.0  # torch's limit for the wait for hosts; the agent has limits of its own
TRY_S = 10.0  # one attempt to reach the store
TELL_S = 20.0  # after this long the user is told what the launch waits for
FIND_S = 600.0  # longest wait for a host that serves the store
ANSWER_S = 60.0  # timeout of a request to the store
UNACKNOWLEDGED_S = 30  # a connection to the store is closed if the other side acknowledges nothing for this long


def serve(listener: socket.socket) -> dist.TCPStore:
    """Serve the store of the agents in this process, and return a connection to it."""
    address, port = listener.getsockname()[:2]
    address = LOOPBACK if address in ("0.0.0.0", "::") else address
    listening = listener.detach()
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)


def run_store(store: dist.Store, run_id: str) -> SignedStore:
    """Return the part of the agents' store that belongs to one run: several runs may use a store."""
    return SignedStore(store, f"ds-harness/{run_id}/")


def connect(endpoint: tuple[str, int], look: Callable[[], None], command: str) -> dist.Store:
    """Return a connection to the store, once somebody serves it; call `look` meanwhile, which may raise.

    Each attempt has a thread, because it blocks for ever if another program accepts the connection and does not answer.
    Messages begin with `command`.
    Raises SystemExit if nobody serves the store within FIND_S seconds.
    """
    begun = time.monotonic()
    tried = -math.inf
    told = False
    found: list[dist.Store] = []
    where = f"{command}: {endpoint[0]}:{endpoint[1]}"
    attempt = threading.Thread()

    def try_once() -> None:
        timeout = timedelta(seconds=TRY_S)
        with suppress(RuntimeError, ValueError):
            found.append(dist.TCPStore(*endpoint, is_master=False, wait_for_workers=False, timeout=timeout))

    while True:
        look()
        if found:
            found[0].set_timeout(timedelta(seconds=ANSWER_S))
            return found[0]
        now = time.monotonic()
        if now - begun > FIND_S:
            text = "nobody serves the store of the run: is the host of --rdzv_endpoint up?"
            print_if_heard(f"{where}: {text}", sys.stderr)
            raise SystemExit(1)
        if not told and now - begun > TELL_S:
            told = True
            print_if_heard(f"{where}: waiting for the store of the run: no answer", sys.stderr)
        if not attempt.is_alive() or now - tried > 3 * TRY_S:
            tried = now
            attempt = threading.Thread(target=try_once, name="connect", daemon=True)
            attempt.start()
        attempt.join(0.2)
        if not attempt.is_alive() and not found:
            time.sleep(0.2)


def break_silent_connections(port: int) -> None:
    """Have the kernel close this process's connections to a port if the other side acknowledges nothing.

    Otherwise a request to the store of a host that is gone blocks until TCP gives up, after a quarter of an hour. torch
    has no option for this, so the sockets are found in /proc.
    """
    options = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_USER_TIMEOUT: UNACKNOWLEDGED_S * 1000}
    for each in list(Path("/proc/self/fd").glob("*")):
        with suppress(OSError):
            if not str(each.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(each.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in options.items():
                        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Heartbeat:
    """The counters by which agents see that the others are alive. A thread increases that of this agent, `node`."""

    def __init__(self, store: SignedStore, node: str) -> None:
        self._store = store.under("heartbeat")
        self._node = node
        own = self._store.clone()
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._checked = -math.inf
        self._closed = threading.Event()
        own.add(node, 1)
        threading.Thread(target=self._beat, args=(own,), name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Stop increasing the counter."""
        self._closed.set()

    def lost(self, nodes: Sequence[str]) -> list[str]:
        """Return the agents whose counters have not changed for LOST_S seconds. Call it every few seconds."""
        others = [node for node in nodes if node != self._node]
        counts = self._store.counts(others) if others else []
        now = time.monotonic()
        was_paused = now - self._checked > PAUSED_S
        self._checked = now
        for node, count in zip(others, counts, strict=True):
            if was_paused or self._seen.get(node, (b"", 0.0))[0] != count:
                self._seen[node] = count, now
        return [node for node in others if now - self._seen[node][1] > LOST_S]

    def _beat(self, store: SignedStore) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with suppress(RuntimeError):  # the store does not answer: the agent itself will notice
                store.add(self._node, 1)


@dataclass(frozen=True, kw_only=True)
class MeetingState:
    """torch's state of a rendezvous, for JSON."""

    round: int
    complete: bool
    closed: bool
    deadline: datetime | None
    participants: list[tuple[_NodeDesc, int]]
    wait_list: list[_NodeDesc]
    redundancy_list: list[_NodeDesc]
    last_heartbeats: list[tuple[_NodeDesc, datetime]]


class JsonBackend(C10dRendezvousBackend):
    """Keeps the state of the rendezvous as JSON. torch's state holder pickles it, and unpickles what it finds.

    What the holder unpickles here was pickled in this process.
    """

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state as the holder reads it, and what `set_state` compares."""
        found = super().get_state()
        return None if found is None else (self._pickled(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write the state unless another agent was faster; return which is there, and whether it is this one."""
        own: _RendezvousState = pickle.loads(state)  # the holder of this process has pickled it
        pairs = {"participants": [*own.participants.items()], "last_heartbeats": [*own.last_heartbeats.items()]}
        lists = {"wait_list": [*own.wait_list], "redundancy_list": [*own.redundancy_list]}
        content: JsonObject = {**vars(own), **pairs, **lists}
        found = super().set_state(STATE.dump_json(MeetingState(**content)), token)
        return None if found is None else (self._pickled(found[0]), *found[1:])

    def _pickled(self, text: bytes) -> bytes:
        try:
            found = STATE.validate_json(text)
        except ValidationError as error:
            raise not_of_this_run(self._key) from error
        state = _RendezvousState()
        vars(state).update(vars(found), wait_list=set(found.wait_list), redundancy_list=set(found.redundancy_list))
        state.participants = dict(found.participants)
        state.last_heartbeats = dict(found.last_heartbeats)
        return pickle.dumps(state)


STATE = TypeAdapter(MeetingState)


class StateHolder(_BackendRendezvousStateHolder):
    """The state of the rendezvous, without agents that are gone."""

    def __init__(
        self, backend: JsonBackend, settings: RendezvousSettings, node: _NodeDesc, tick: Callable[[], None]
    ) -> None:
        super().__init__(backend, settings)
        self._node = node
        self._tick = tick
        self.gone: frozenset[str] = frozenset()  # names of agents to leave out
        self.expected = settings.max_nodes  # number of hosts to wait for
        self.last_call = LAST_CALL_S  # seconds without a new host after which those that are there start
        self._came: tuple[frozenset[_NodeDesc], float] = (frozenset(), 0.0)

    def sync(self) -> bool | None:
        """Read or write the state; end the wait for further hosts when it has been long enough.

        torch's own deadline is a time by the clock of one host, which others compare with theirs. So the deadline
        written here is either far in the past or far in the future.
        """
        self._tick()
        has_set: bool | None = super().sync()
        state = self.state
        here = frozenset(state.participants)
        if here != self._came[0]:
            self._came = here, time.monotonic()
        if state.complete or len(here) < self._settings.min_nodes:
            return has_set
        is_over = len(here) >= self.expected or time.monotonic() - self._came[1] > self.last_call
        state.deadline = (datetime.min if is_over else datetime.max).replace(tzinfo=UTC)
        return has_set

    def _sanitize(self) -> None:
        """Let torch remove the agents that are gone, and all but the newest agent of each launch."""
        state = self._state
        everyone = {*state.participants, *state.wait_list, *state.redundancy_list}
        latest = {node.pid: node.local_id for node in sorted({*everyone, self._node}, key=lambda node: node.local_id)}
        for node in everyone:
            is_gone = str(node) in self.gone or node.local_id < latest[node.pid]
            state.last_heartbeats[node] = (datetime.min if is_gone else datetime.max).replace(tzinfo=UTC)
        super()._sanitize()


class Rendezvous(DynamicRendezvousHandler):
    """The handler for torch's elastic agent.

    Args:
        name: address of this host, a number for its launch, and a number that grows with each agent of the launch.
        tick: called at least every few seconds while this agent waits for others.
    """

    def __init__(
        self, store: SignedStore, options: Options, name: tuple[str, int, int], tick: Callable[[], None]
    ) -> None:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        node = _NodeDesc(*name)
        without_limit = timedelta(seconds=JOIN_S)
        run_id = options.rdzv_id
        settings = RendezvousSettings(run_id, *options.nodes, RendezvousTimeout(join=without_limit), without_limit, 1)
        self.holder = StateHolder(JsonBackend(store, run_id), settings, node, tick)
        self.node = str(node)
        self._agents_store = store
        super().__init__(node, settings, "c10d", store, self.holder)

    def _start_heartbeats(self) -> None:
        """Do nothing: `Heartbeat` replaces torch's heartbeats."""

    def _get_store(self) -> SignedStore:
        """Return the store of this rendezvous, with any address in it.

        torch would block until agent 0 has written one, and that agent may be lost. Ranks take theirs from the plan.
        """
        store = self._agents_store.under(f"round/{self.holder.state.round}")
        for key, value in (("MASTER_ADDR", ""), ("MASTER_PORT", "0")):
            store.set(key, value)
        return store

    def participants(self) -> list[str]:
        """Return the names of the agents that take part, in the order of their numbers once they have some."""
        numbers = self.holder.state.participants
        return [str(node) for node in sorted(numbers, key=lambda node: numbers[node])]

    def takes_part(self) -> bool:
        """Return whether this agent is still one of the participants: it may have been stopped, and counted as lost."""
        self.holder.sync()
        return self.node in self.participants()

    def waiting(self) -> list[str]:
        """Return the names of further agents that wait to take part."""
        self.holder.gone = frozenset()  # an agent that was lost during the rendezvous may have come back since
        self.holder.sync()
        return [str(node) for node in self.holder.state.wait_list]
