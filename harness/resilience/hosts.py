"""The hosts and devices that a run may use, and the command that starts an agent on each host."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import socket
import subprocess
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import UserError
from harness.resilience.hostfile import MOST_SLOTS, read_hostfile
from harness.resilience.options import HOSTFILE, Options
from harness.topology.env import SECRET, inherited
from harness.topology.interfaces import address_towards, listen_at
from harness.topology.processes import own_python
from harness.topology.slurm import address_of, ask, in_step, tasks_on_node
from harness.verb_parser import integer

DS_HARNESS = tuple(own_python("-m", "harness.cli"))
LOCALHOST = "localhost"
BACKLOG = 2048  # hosts that connect at once
COUNT_DEVICES = (
    "from deepspeed.accelerator import get_accelerator as a; print('devices', a().device_name(), a().device_count())"
)
# Prefixes of variables that the `deepspeed` command, too, passes to other hosts.
EXPORTED = ("PYTHON", "NCCL", "UCX", "MLFLOW", "MV2", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "GLOO_", "DS_", "HF_",
            "PYTORCH_", "TORCH_")  # fmt: skip
ENVIRONMENT_FILES = (Path.home() / ".deepspeed_env", Path(".deepspeed_env"))  # lines `NAME=VALUE` for other hosts
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=3")


@dataclass(frozen=True, kw_only=True)
class HostDevices:
    """A host and the numbers of its devices, one for each rank."""

    name: str
    devices: tuple[int, ...]
    slurm: bool = False  # whether processes are started there by srun

    @property
    def is_here(self) -> bool:
        """Whether the host is this one, and no srun is needed to start a process there."""
        if self.slurm:
            return False
        if self.name in (LOCALHOST, socket.gethostname()):
            return True
        with suppress(OSError), socket.socket() as probe:
            probe.bind((socket.gethostbyname(self.name), 0))
            return True
        return False

    def command(self, words: Sequence[str], ssh_port: int | None) -> list[str]:
        """Return the command that runs `ds-harness` with these words there."""
        launch = [*DS_HARNESS, *words]
        if self.is_here:
            return launch
        if self.slurm:
            options = ["--quiet", "--overlap", "-N1", "-n1", "-w", self.name, "--unbuffered", "--cpu-bind=none"]
            return ["srun", *options, *launch]
        python_path = inherited("PYTHONPATH")
        variables = ["env", *(f"{name}={value}" for name, value in python_path.items())] if python_path else []
        command = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([*variables, *launch])}"
        return [*SSH, *(("-p", str(ssh_port)) if ssh_port else ()), self.name, command]

    def environment(self) -> dict[str, str]:
        """Return the variables for a launch there, besides those that it finds there itself."""
        if self.is_here or self.slurm:
            return inherited(SECRET)  # srun may have been told to pass no variables
        lines = [line.strip() for path in ENVIRONMENT_FILES if path.is_file() for line in path.read_text().splitlines()]
        stated = [line.partition("=") for line in lines if "=" in line and not line.startswith("#")]
        return {**inherited(*EXPORTED), **{name: value for name, _, value in stated}, **inherited(SECRET)}


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of a batch job or of salloc."""

    hosts: tuple[str, ...]
    tasks_per_node: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Allocation | None:
        """Return this shell's allocation; None without one or in a job step. Raises UserError if it cannot be read."""
        nodes = environ.get("SLURM_JOB_NODELIST")
        if nodes is None or in_step(environ) or shutil.which("scontrol") is None:
            return None
        names = ask("scontrol", "show", "hostnames", nodes).split()
        if not names or not all(re.fullmatch(r"[\w.-]+", name, re.ASCII) for name in names):
            raise UserError(f"`scontrol show hostnames {nodes}` gives no names of hosts: ask whether Slurm is up")
        tasks = environ.get("SLURM_GPUS_ON_NODE") or str(tasks_on_node(environ.get("SLURM_TASKS_PER_NODE", "1"), 0))
        return cls(hosts=tuple(names), tasks_per_node=int(tasks) if tasks.isdigit() else 1)


def find_hosts(options: Options) -> tuple[HostDevices, ...]:
    """Return the hosts of a run with the devices to use. UserError if one is unknown, or no host is left."""
    hosts = _all_hosts(options)
    if options.include or options.exclude:
        hosts = _filtered(hosts, options)
    elif options.num_nodes:
        hosts = hosts[: options.num_nodes]
    if not hosts:
        raise UserError("no host is left to run on: check --include, --exclude and the hostfile")
    return tuple(hosts)


def _all_hosts(options: Options) -> list[HostDevices]:
    wanted = options.num_accelerators
    path = options.hostfile or (HOSTFILE if Path(HOSTFILE).is_file() else None)
    allocation = None if options.rdzv_endpoint or path else Allocation.from_environ(inherited())
    if path and not options.rdzv_endpoint:
        found = [(host.name, wanted or host.slots) for host in read_hostfile(path)]
    elif allocation is not None:
        found = [(name, wanted or allocation.tasks_per_node) for name in allocation.hosts]
    else:
        stated = [slots for name, slots in _node_list(options.include) if name == LOCALHOST]
        found = [(LOCALHOST, wanted or (max(map(max, stated)) + 1 if all(stated) and stated else devices_here()[1]))]
    slurm = allocation is not None
    return [HostDevices(name=name, devices=tuple(range(slots)), slurm=slurm) for name, slots in found]


def counts_own_devices(options: Options) -> bool:
    """Return whether the run is on this host alone, with as many ranks as devices are found."""
    stated = ("num_accelerators", "include", "exclude", "hostfile", "num_nodes", "rdzv_endpoint")
    if any(getattr(options, name) for name in stated) or Path(HOSTFILE).is_file():
        return False
    return Allocation.from_environ(inherited()) is None


def devices_here() -> tuple[str, int]:
    """Return the kind of this host's devices, and their number, as DeepSpeed names and counts them.

    UserError if there are none. On a CPU the number is that of the NUMA nodes.
    """
    done = subprocess.run(own_python("-c", COUNT_DEVICES), capture_output=True, text=True, check=False)
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("devices ")]
    if not found or int(found[-1][1]) < 1:
        raise UserError("no device was found: give --num_accelerators N")
    return found[-1][0], int(found[-1][1])


def _filtered(hosts: list[HostDevices], options: Options) -> list[HostDevices]:
    """Apply --include or --exclude."""
    flag, spec = ("--include", options.include) if options.include else ("--exclude", options.exclude)
    named = _node_list(spec)
    known = {host.name: host for host in hosts}
    for name, devices in named:
        if name not in known:
            raise UserError(f"{flag} {spec}: there is no host {name}: use one of {', '.join(known)}")
        if missing := set(devices) - set(known[name].devices):
            raise UserError(f"{flag} {spec}: {name} has no device {min(missing)}")
    chosen = []
    for host in hosts:
        specs = [devices for name, devices in named if name == host.name]
        listed = {device for devices in specs for device in (devices or host.devices)}
        kept = tuple(device for device in host.devices if (device in listed) == bool(options.include))
        chosen.append(replace(host, devices=kept))
    return [host for host in chosen if host.devices]


def _node_list(spec: str) -> list[tuple[str, list[int]]]:
    """Parse `host-a@host-b:0,2` into hosts and devices; an empty list means all devices of a host."""
    nodes = []
    for node in filter(None, spec.split("@")):
        name, _, devices = node.partition(":")
        try:
            numbers = [integer(device) for device in devices.split(",") if device]
        except ArgumentTypeError:
            raise UserError(f"{node!r} is not HOST or HOST:NUMBER,NUMBER") from None
        if max(numbers, default=0) >= MOST_SLOTS:
            raise UserError(f"{node!r}: a host has at most {MOST_SLOTS:,} devices")
        nodes.append((name, numbers))
    return nodes


def address_here(host: str, port: int = 1) -> str:
    """Return the address of this host from which packets to another would leave; UserError if there is no way."""
    try:
        return address_towards(address_of(host) or host, port)
    except OSError as error:
        raise UserError(f"{host}: cannot be reached: {error.strerror or error}") from error


def listen(host: str, port: int, *, always: bool = False) -> socket.socket | None:
    """Listen at an address; None if it is another host's, or another launch of this host listens there already.

    `always`: listen at all addresses of this host if the address seems not to be its own, as behind a load balancer.
    Raises UserError if there is no such host, or the port cannot be opened.
    """
    try:
        listener = listen_at(host, port, BACKLOG)
    except socket.gaierror as error:
        if not always:
            return None  # the name may come with its host
        raise UserError(f"{host}: no such host: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UserError(f"{host}:{port}: cannot listen there: {os.strerror(error.errno or 0)}") from error
    return listener or (socket.create_server(("", port), backlog=BACKLOG) if always else None)
