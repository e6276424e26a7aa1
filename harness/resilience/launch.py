"""`ds-harness launch`: where a run starts. Who starts what, from the top:

    ds-harness launch       this file: reads the flags
      Agent                 elastic.py, in the same process: torch's elastic agent. It meets the agents of other hosts,
                            starts the ranks of this one, and starts them again
        rank                harness/train.py or the user's script
        standby             on_host/standby.py: has imported torch, and forks the ranks of each start
        keeper              on_host/keeper.py: ends the ranks if this command is killed

On several hosts this command runs on each of them (`--rdzv_endpoint`). With a hostfile, or in a Slurm job, it starts
itself on each by ssh or srun: `starter.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.console import drop_output_without_reader, print_if_heard
from harness.errors import UserError, headline
from harness.resilience.hosts import HostDevices, address_here, find_hosts, listen
from harness.resilience.on_host.keeper import GRACE_S, keep
from harness.resilience.on_host.processes import LineReader, become_subreaper
from harness.resilience.on_host.ranks import Ranks
from harness.resilience.options import QUIET, USAGE, Options, read_options
from harness.resilience.process.signals import SIGNALS
from harness.resilience.script import Script
from harness.resilience.starter import Starter
from harness.resilience.team import LOST, Offer
from harness.topology.env import LOOPBACK, SECRET, changed_environment, inherited, replace_environment, run_secret

SILENT_S = 60.0  # a starter on another host that sends nothing for this long counts as gone
STOPPED = 0.8  # a stopped rank is ended after this share of --hang_seconds, before others take its host for lost
IS_LINUX = sys.platform == "linux"  # a standby process needs a subreaper, which other systems lack


def launch(argv: Sequence[str]) -> int:
    """Run a training script on the ranks that the flags ask for; return its exit code, or 128 + a signal's number."""
    if not argv:
        print(USAGE)
        return 2
    return start(read_options(argv))


def start(options: Options) -> int:
    """Start a script on the ranks that the options ask for, as `launch` does."""
    control = Control(is_started=options.started)
    script = Script(options.script)
    if options.max_restarts:
        script.require_resumable()
    hosts = find_hosts(options)
    _have_secret(options)
    if len(hosts) > 1 or not hosts[0].is_here:
        return Starter(options, hosts, control.received).run()
    script.require_startable(module=options.module, command=options.no_python)
    code = run_agent(options, hosts[0], script, control)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # at Python's own exit a thread that still waits for a store, inside C++, would cause a SIGABRT


def _have_secret(options: Options) -> None:
    """Give this run a secret, which its agents and ranks inherit. Hosts that meet at an endpoint must be given one."""
    if run_secret():
        return
    if options.rdzv_endpoint and options.nodes[1] > 1:
        if options.node_rank:
            return  # the first host says it
        risk = f"whoever reaches {options.rdzv_endpoint} can run programs as this user on all hosts"
        remedy = "set it to one random text on all of them, as `openssl rand -hex 32` prints it"
        print_if_heard(f"{options.command}: {SECRET} is not set: {risk}; {remedy}", sys.stderr)
        return
    replace_environment({**inherited(), SECRET: secrets.token_hex(32)})


class StarterGone(Exception):
    """The launch that has started this one has ended or does not answer."""


class Control:
    """Signals to this launch: from the system, and from the launch that has started it, perhaps on another host.

    The starter sends lines: first variables for this process, then numbers of signals; 0 only shows that it is alive.
    """

    def __init__(self, *, is_started: bool) -> None:
        self.received: list[int] = []  # the signals so far
        self._input: LineReader | None = None
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda number, _: self.received.append(number))
        if is_started:
            with open(0, "rb", buffering=0, closefd=False) as pipe:  # unbuffered: signals may follow
                variables = pipe.readline()
            if not variables:
                raise UserError("the launch that has started this one is gone")
            replace_environment({**inherited(), **json.loads(variables)})
            self._input = LineReader(0)
        self._heard = time.monotonic()

    def look(self) -> None:
        """Read messages of the starter. Raises StarterGone."""
        if self._input is not None:
            if lines := self._input.read():
                self._heard = time.monotonic()
                self.received += [int(line) for line in lines if line != "0"]
            if self._input.is_closed or time.monotonic() - self._heard > SILENT_S:
                raise StarterGone


def run_agent(options: Options, host: HostDevices, script: Script, control: Control) -> int:
    """Run the agent of this host until the run is over; return the exit code.

    Raises UserError if no temporary folder can be made.
    """
    become_subreaper()
    drop_output_without_reader()
    try:
        root = Path(tempfile.mkdtemp(prefix="ds-harness-"))
    except OSError as error:
        where = tempfile.gettempdir()
        raise UserError(f"{where}: no folder can be made for what ranks record: {error.strerror}") from error
    keeper = keep(root)
    saves_time = options.max_restarts or len(host.devices) > 1
    preloads = bool(saves_time) and script.is_known and not (options.no_standby or options.no_python) and IS_LINUX
    ranks = Ranks(root, stopped_s=STOPPED * script.hang_seconds, preloads=preloads, spared=[keeper.pid])
    try:
        return _meet_and_run(options, host, script, ranks, control)
    except StarterGone:
        ranks.end_slowly(GRACE_S)
        return 128 + signal.SIGTERM
    finally:
        ranks.close()
        shutil.rmtree(root, ignore_errors=True)
        keeper.kill()  # even if it is stopped: it has nothing left to do
        keeper.wait()


def _meet_and_run(options: Options, host: HostDevices, script: Script, ranks: Ranks, control: Control) -> int:
    endpoint = _endpoint(options)
    listener = None if endpoint is None or options.started else listen(*endpoint, always=options.node_rank == 0)
    replace_environment({**inherited(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})  # see `rendezvous`
    # The number of this launch in the rendezvous. If a starter starts it again, the new one replaces the old one.
    launched = options.node_rank if options.started else int.from_bytes(os.urandom(4), "big") | 1 << 31
    assert launched is not None
    with changed_environment({**QUIET, **inherited(*QUIET)}):  # for this process alone
        from torch.distributed import HashStore
        from torch.distributed.elastic.rendezvous import RendezvousError

        from harness.resilience.elastic import Agent
        from harness.resilience.rendezvous import break_silent_connections, connect, run_store, serve

    def look() -> None:
        control.look()
        ranks.look()

    def wait() -> None:
        look()
        if control.received:
            raise SystemExit(128 + control.received[0])

    history = None
    server = None if listener is None else serve(listener)
    reached = endpoint if server is None else (server.host, server.port)
    in_process = HashStore()  # for a host that is alone: no port is opened
    for incarnation in itertools.count(int(time.time())):
        try:
            meeting = in_process if reached is None else connect(reached, wait, options.command)
            store = run_store(meeting, options.rdzv_id)
            offer = _offer(options, host, endpoint)  # only now: before, the endpoint's name could not be resolved
            name = (offer.address, launched, incarnation)
            received = control.received
            serves = endpoint is None or server is not None
            agent = Agent(offer, name, options, script, ranks, store, look, received, history, serves=serves)
            if endpoint is not None and server is None:  # a store in this process stays while the network is down
                break_silent_connections(endpoint[1])
            try:
                agent.run()
            finally:
                agent.heartbeat.close()
                history = agent.leader.known
        except SystemExit as end:
            assert isinstance(end.code, int)
            if end.code != LOST:
                return end.code
        except (RuntimeError, RendezvousError) as error:
            reason = headline(error.__cause__ or error)
            text = f"the store of the run at {options.rdzv_endpoint} does not answer: {reason}"
            print_if_heard(f"{options.command}: {text}", sys.stderr)
        ranks.end()
    raise AssertionError("an agent ended without an exit code")


def _offer(options: Options, host: HostDevices, endpoint: tuple[str, int] | None) -> Offer:
    """Return what this host brings to each start."""
    address = options.local_addr or (LOOPBACK if endpoint is None else address_here(*endpoint))
    if endpoint is not None and address.startswith("127.") and options.nodes[1] > 1:
        address = endpoint[0]  # this host is the endpoint: others reach it by that name
    name = options.host or (socket.gethostname() if options.rdzv_endpoint else host.name)
    return Offer(host=name, devices=host.devices, address=address, position=options.node_rank or 0)


def _endpoint(options: Options) -> tuple[str, int] | None:
    """Return where the agents meet; None if this host is alone."""
    host, _, port = options.rdzv_endpoint.rpartition(":")
    return (host.strip("[]"), int(port)) if options.rdzv_endpoint else None
