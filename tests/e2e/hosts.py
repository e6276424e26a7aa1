"""Hosts made on one machine: each a network namespace with an address, an sshd and a view of the files of its own.

They are joined by a bridge, so a cable can be cut and a host be killed. Needs root and ip; with ssh, sshd and pdsh too.
A host without ssh stands for a pod: each starts its own part of a run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.topology.processes import command_of

PROGRAMS = ("ip", "nsenter", "unshare")
SSH_PROGRAMS = ("sshd", "pdsh", "ssh", "ssh-keygen")
NETWORK = "10.213.77"
SSHD = """Port 22
ListenAddress {address}
HostKey {key}
AuthorizedKeysFile {key}.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
ClientAliveInterval 2
ClientAliveCountMax 2
"""


def missing(*, ssh: bool = True) -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "needs root"
    wanted = [*PROGRAMS, *(SSH_PROGRAMS if ssh else ())]
    absent = [name for name in wanted if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"needs {', '.join(absent)}"
    name = f"dsh-probe-{os.getpid()}"  # workers of the tests look at the same time
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"ip netns: {probe.stderr.strip()}" if probe.returncode else ""


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: of its network namespace.
        cable: the end of its cable at the bridge.
        sshd: the process in whose namespaces its processes run; without ssh one that sleeps.
    """

    name: str
    address: str
    cable: str
    sshd: subprocess.Popen[bytes]

    def command(self, *words: str) -> list[str]:
        """Return a command that runs on this host."""
        return ["nsenter", f"--target={self.sshd.pid}", "--net", "--mount", "--uts", *words]

    def cut_cable(self) -> None:
        """Take the host off the network; its processes go on."""
        _ip("link", "set", self.cable, "down")

    def join_cable(self) -> None:
        """Take the host into the network again."""
        _ip("link", "set", self.cable, "up")

    def processes(self) -> list[int]:
        """The processes on this host, its sshd left out."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout.split()
        return [int(pid) for pid in pids if int(pid) != self.sshd.pid]

    def kill(self) -> None:
        """End all of its processes at once, as when the power fails, and take it off the network."""
        self.cut_cable()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.sshd.kill()
        self.sshd.wait()


@dataclass(frozen=True)
class Hosts:
    """Some hosts on one network, the first being where the user types."""

    hosts: list[Host]
    folder: Path

    def environment(self) -> dict[str, str]:
        """The variables with which ssh and pdsh reach all hosts without a question."""
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": _ssh_options(self.folder), "PATH": path}

    def hostfile(self, slots: int = 1) -> Path:
        """Write a hostfile; return its path."""
        path = self.folder / "hostfile"
        path.write_text("".join(f"{host.address} slots={slots}\n" for host in self.hosts))
        return path


@contextmanager
def some_hosts(count: int, folder: Path, *, ssh: bool = True) -> Iterator[Hosts]:
    """Make hosts, and remove all that belongs to them at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    if ssh:
        Path("/run/sshd").mkdir(exist_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    bridge, made = f"dsh{os.getpid() % 100000}", []
    _ip("link", "add", bridge, "type", "bridge")
    _ip("link", "set", bridge, "up")
    try:
        for number in range(count):
            made.append(_host(number, bridge, folder, ssh=ssh))
        if ssh:
            _plain_ssh(folder)
        yield Hosts(made, folder)
    finally:
        for host in made:
            host.kill()
            _ip("link", "del", host.cable)  # its namespace may live on while a process that was killed still ends
            _ip("netns", "del", host.name)
        _ip("link", "del", bridge)


def _host(number: int, bridge: str, folder: Path, *, ssh: bool) -> Host:
    name, cable, address = f"{bridge}h{number}", f"{bridge}c{number}", f"{NETWORK}.{number + 1}"
    _ip("netns", "add", name)
    _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", cable, "master", bridge, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    config = folder / f"sshd-{number}"
    config.write_text(SSHD.format(address=address, key=folder / "key"))
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin") or "sshd"
    inside = ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "--propagation", "slave"]
    stays = f"{sshd} -D -f {config}" if ssh else "sleep infinity"
    inside += ["sh", "-c", f"hostname host-{number}; exec {stays}"]
    process = subprocess.Popen(inside, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while Path((command_of(process.pid) or ("ip",))[0]).name in ("ip", "unshare", "sh"):  # not yet in its namespaces
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    return Host(name, address, cable, process)


def _plain_ssh(folder: Path) -> None:
    """Put an `ssh` before the system's that knows the key, for programs that take no further arguments."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "ssh"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {_ssh_options(folder)} "$@"\n')
    script.chmod(0o755)


def _ssh_options(folder: Path) -> str:
    """Return what ssh needs to ask nothing, and to end soon after a host is lost."""
    quiet = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    return f"-i {folder}/key {quiet} -o ServerAliveInterval=2 -o ServerAliveCountMax=2"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
