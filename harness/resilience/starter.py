"""Start `ds-harness` on each host by ssh or srun, and again on lost hosts; serve the store of the agents.

The engine starts nothing on other hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from harness.arguments.words import without
from harness.console import drop_output_without_reader, print_if_heard
from harness.errors import UserError
from harness.resilience.hosts import LOCALHOST, HostDevices, address_here, listen
from harness.resilience.on_host.processes import become_subreaper, signal_when_parent_dies
from harness.resilience.options import BY_STARTER, QUIET, Options
from harness.topology.env import LOOPBACK, changed_environment, inherited

HOST_RETRY_S = 30.0  # interval of attempts to reach missing hosts
END_S = 20.0  # after the end of the run: time for all launches to exit
PING_S = 1.0
LOOK_S = 0.1
OWN_ERRORS = (1, 2)  # exit codes of a launch for errors that the user must fix


class HostLaunch:
    """The launch on a host, from the starter's side."""

    def __init__(self, host: HostDevices, words: Sequence[str], ssh_port: int | None) -> None:
        drop_output_without_reader()  # ranks inherit these streams
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            host.command(words, ssh_port),
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=partial(signal_when_parent_dies, signal.SIGCONT),  # a stopped one could not clean up
        )
        assert self.process.stdin is not None
        self.send(json.dumps(host.environment()) + "\n")
        os.set_blocking(self.process.stdin.fileno(), False)  # else a stopped one would block this process

    def send(self, lines: str) -> None:
        """Send lines. They are lost if the launch has exited, or has been stopped for so long that the pipe is full."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(lines.encode())

    def end(self) -> int:
        """Kill it: its keeper ends what it leaves. Returns its exit code."""
        self.process.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()


class Starter:
    """Keeps a launch on each host until the run is over. `received`: signals that this process gets."""

    def __init__(self, options: Options, hosts: Sequence[HostDevices], received: Sequence[int]) -> None:
        self.options = options
        self.hosts = hosts
        self.received = received
        self.launches: dict[int, HostLaunch] = {}
        self.missing: dict[int, float] = {}  # when each host without a launch is tried again
        self._told = ""
        self._address = LOOPBACK
        for host in hosts:
            if not host.is_here and self._address == LOOPBACK:
                with suppress(UserError):  # a host that cannot be reached now
                    found = address_here(host.name)
                    self._address = LOOPBACK if found.startswith("127.") else found
        listener = listen(self._address, 0)
        if listener is None:
            raise UserError(f"{self._address}: no port can be opened there")
        self._listener = listener
        self._endpoint = listener.getsockname()[:2]

    def run(self) -> int:
        """Run the script to its end; return the exit code."""
        become_subreaper()
        for index in range(len(self.hosts)):
            self._begin(index)
        with changed_environment({**QUIET, **inherited(*QUIET)}):
            from harness.resilience.rendezvous import run_store, serve  # imports torch, as the launches do meanwhile

        self.store = run_store(serve(self._listener), self.options.rdzv_id)
        try:
            return self._keep()
        finally:
            for each in self.launches.values():
                each.end()

    def _begin(self, index: int) -> None:
        """Start the launch of a host."""
        options = self.options
        host = self.hosts[index]
        count = len(self.hosts)
        words = {
            "--nnodes": f"{1 if options.max_restarts else count}:{count}",
            "--rdzv_endpoint": f"{self._endpoint[0]}:{self._endpoint[1]}",
            "--node_rank": str(index),
            "--local_addr": self._address if host.is_here else host.name,
            "--include": f"{LOCALHOST}:{','.join(map(str, host.devices))}",
            "--host": host.name,
            "--wanted": str(sum(len(each.devices) for each in self.hosts)),
        }
        flags = [*without(options.flags, BY_STARTER), *(word for pair in words.items() for word in pair), "--started"]
        script = options.script[1:] if options.verb == "train" else options.script  # which `train` names itself
        self.launches[index] = HostLaunch(host, [options.verb, *flags, *script], options.ssh_port)

    def _keep(self) -> int:
        """Keep the launches going until the run is over; return the exit code."""
        passed, pinged = 0, 0.0
        while not self.store.check(["end"]):
            time.sleep(LOOK_S)
            numbers = list(self.received[passed:])
            passed += len(numbers)  # not all that have come: another one may come in between
            if time.monotonic() - pinged > PING_S:
                numbers = [*numbers, 0]
                pinged = time.monotonic()
            for each in self.launches.values():
                each.send("".join(f"{number}\n" for number in numbers))
            for index, each in list(self.launches.items()):
                if each.process.poll() is not None and (code := self._lose(index, each)) is not None:
                    return code
            for index, at in list(self.missing.items()):
                if time.monotonic() > at:
                    del self.missing[index]
                    self._begin(index)
            self._tell_missing()
        return self._last()

    def _lose(self, index: int, launch: HostLaunch) -> int | None:
        """Handle the end of a launch: try its host again later, or return the exit code if the run is over."""
        code = launch.end()
        del self.launches[index]
        if self.store.check(["end"]):
            return self._last()
        if self.received:
            return None if self.launches else 128 + self.received[0]
        host = self.hosts[index]
        if code in OWN_ERRORS and not host.slurm:
            return code
        if not self.options.max_restarts:
            print_if_heard(f"{self.options.command}: no answer from {host.name}", sys.stderr)
            return 1
        was_there = host.is_here or time.monotonic() - launch.begun > HOST_RETRY_S
        self.missing[index] = time.monotonic() + (0.0 if was_there else HOST_RETRY_S)
        return None

    def _last(self) -> int:
        """Wait until all launches have exited, which read the same verdict; return the exit code."""
        code = self.store.take("end", int)
        until = time.monotonic() + END_S
        while time.monotonic() < until and any(each.process.poll() is None for each in self.launches.values()):
            time.sleep(LOOK_S)
        return 128 + self.received[0] if self.received and code else code

    def _tell_missing(self) -> None:
        """Tell the agents which hosts do not answer, so that they do not wait for them."""
        names = ", ".join(self.hosts[index].name for index in sorted(self.missing))
        if names != self._told:
            self._told = names
            self.store.put("expected", max(len(self.hosts) - len(self.missing), 1))
            self.store.set("missing", names)
