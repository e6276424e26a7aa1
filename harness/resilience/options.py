"""The flags of `ds-harness launch` and `train`: their own, and those of the `deepspeed` command."""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NoReturn, TypeVar

from harness.command_line.other_programs import other_programs
from harness.config.values.json_object import JsonObject
from harness.config.values.paths import usable_path
from harness.errors import UserError
from harness.resilience.hostfile import MOST_SLOTS
from harness.topology.env import inherited
from harness.topology.launchers import HostAssignment
from harness.verb_parser import LARGEST, Boolean, VerbParser, integer

T = TypeVar("T")
QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL"}  # else each failed request to a store prints a page of C++ frames
TRAIN = "harness.train"  # the module that every rank of `ds-harness train` runs
OF_SCRIPTS = ("module", "no_python", "no_local_rank")  # flags about how a script of the user's is started
IGNORED = "ignored"  # flags of other launchers that change nothing here
HOSTFILE = "/job/hostfile"  # where the `deepspeed` command looks
EXAMPLE = """example:
  ds-harness launch --max_restarts 20 --num_accelerators 8 scripts/train.py --deepspeed_config pipeline_3d \\
      --max_steps 1000 --save_steps 100 --output_dir runs/a

  on each of two to four hosts:
  ds-harness launch --nnodes 2:4 --nproc_per_node 8 --rdzv_endpoint host-a:29400 --max_restarts 20 \\
      scripts/train.py --deepspeed_config pipeline_3d --max_steps 1000 --save_steps 100 --output_dir runs/a"""
USAGE = f"usage: ds-harness launch [flags] SCRIPT ARGUMENTS (see --help)\n\n{EXAMPLE}"
DESCRIPTION = """Start a training script on all devices, of one host or several, and keep it going. On several hosts run
this command on each, with the same --rdzv_endpoint, as torchrun; or once, with a hostfile, and it uses ssh.

Signals go to the ranks: they save and stop, and the exit code is 128 + the signal's number. With --max_restarts a run
that fails goes on from its newest checkpoint, on the hosts that answer, with the same global batch."""
_TYPES = {int: integer, str: str}


def _flag(kind: type, default: T, metavar: str, what: str, *names: str) -> T:
    return field(default=default, metadata={"kind": kind, "metavar": metavar, "help": what, "names": names})


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to start a run, and how often. A field with metadata is the flag of its name."""

    verb: str  # what the user typed: launch or train
    script: tuple[str, ...]  # what runs on each rank, with its arguments
    flags: tuple[str, ...]  # the words before it, each flag under its own name
    max_restarts: int = _flag(int, 0, "N", "start again up to N times")
    min_ranks: int | None = _flag(
        int,
        None,
        "K",
        "fewest ranks to continue with; with fewer, wait for hosts (default: 1 with --max_restarts or --nnodes N:M, "
        "else all)",
    )
    num_accelerators: int | None = _flag(
        int,
        None,
        "N",
        "ranks on each host (default: all)",
        "--num_gpus",
        "--nproc_per_node",
    )
    nnodes: str | None = _flag(str, None, "N[:M]", "number of hosts, or MIN:MAX")
    rdzv_endpoint: str = _flag(str, "", "HOST:PORT", "address of one of the hosts, where all launches rendezvous")
    rdzv_id: str = _flag(str, "run", "ID", "id of the run, if several runs share an endpoint")
    node_rank: int | None = _flag(int, None, "N", "index of this host (default: sorted by address)")
    local_addr: str = _flag(str, "", "A", "address of this host (default: detected)")
    num_nodes: int | None = _flag(int, None, "N", "use the first N hosts")
    hostfile: str | None = _flag(str, None, "FILE", f"lines `host slots=N` (default: {HOSTFILE} if there is one)", "-H")
    include: str = _flag(str, "", "SPEC", "hosts and devices to use, as host-a@host-b:0,2", "-i")
    exclude: str = _flag(str, "", "SPEC", "hosts and devices not to use", "-e")
    master_addr: str = _flag(str, "", "A", "where rank 0 listens (default: the first host)")
    master_port: int | None = _flag(int, None, "P", "its port (default: a free one at each start)")
    ssh_port: int | None = _flag(int, None, "P", "port of sshd on the other hosts")
    module: bool = _flag(bool, False, "", "the script is a module, as in `python -m`")
    no_python: bool = _flag(bool, False, "", "the script is a command of its own")
    no_local_rank: bool = _flag(bool, False, "", "do not pass --local_rank to the script")
    no_standby: bool = _flag(bool, False, "", "keep no process ready on each host for the next restart")
    # Another launch has started this one, by the same verb, and tells it its name and the number of ranks on all hosts.
    started: bool = _flag(bool, False, "", argparse.SUPPRESS)
    host: str = _flag(str, "", "", argparse.SUPPRESS)
    wanted: int | None = _flag(int, None, "", argparse.SUPPRESS)

    @property
    def command(self) -> str:
        """The command with which messages to the user begin."""
        return f"ds-harness {self.verb}"

    @property
    def nodes(self) -> tuple[int, int]:
        """The least and the largest number of hosts that run this command."""
        least, _, most = (self.nnodes or "1").partition(":")
        return int(least), int(most or least)


BY_STARTER = {  # flags with a value which a launch that starts others by ssh or srun applies itself
    name
    for each in fields(Options)
    if each.name in ("hostfile", "include", "exclude", "num_nodes", "num_accelerators", "ssh_port")
    for name in (f"--{each.name}", *each.metadata["names"])
}


class LaunchParser(VerbParser):
    """Reads the flags of a launch. Raises UserError for unusable ones."""

    joins_values = False  # `--no_python true` runs the command true

    def error(self, message: str) -> NoReturn:
        """Say what to do instead of an unknown flag."""
        refuse_others(message.split())
        raise UserError(f"{message} (see --help)")


def refuse_others(words: Sequence[str]) -> None:
    """Raise UserError for a flag of another launcher that does not exist here, with what to do instead."""
    for flag in (word.partition("=")[0] for word in words):
        if instead := other_programs().refused_by_launch.get(flag):
            raise UserError(f"{flag}: {instead}")


def read_options(argv: Sequence[str]) -> Options:
    """Return the flags before the script, and the script with its arguments. UserError if they are wrong."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    words = parser.spelled(argv)  # as many
    start = len(argv) - len(given.pop("arguments")) - 1
    start -= argv[start] != given.pop("script")  # argparse swallows a "--" after the script
    return _options(given, verb="launch", script=argv[start:], flags=words[:start])


def training_options(argv: Sequence[str]) -> Options:
    """Return the flags of a launch of `harness.train` among the flags of the run. UserError if they are wrong."""
    parser = LaunchParser("train", "", allow_abbrev=False)
    parser.joins_values = True  # no script follows
    add_launch_flags(parser, of_any_script=False)
    flags, others = parser.parted(argv)
    refuse_others(others)
    given = vars(parser.parse_args(flags))
    return _options({**given, "module": True}, verb="train", script=[TRAIN, *others], flags=flags)


def _options(given: JsonObject, *, verb: str, script: Sequence[str], flags: Sequence[str]) -> Options:
    given.pop(IGNORED, None)
    _fill_from_launcher(given)
    options = Options(verb=verb, script=tuple(script), flags=tuple(flags), **given)
    _require(options)
    return options


def _fill_from_launcher(given: JsonObject) -> None:
    """Set flags that were not given from the launcher of this host: Kubeflow, JobSet, Slurm and others."""
    chosen = any(given[name] for name in ("hostfile", "num_nodes", "rdzv_endpoint"))
    host = None if chosen else HostAssignment.from_environ(inherited())
    if host is not None:
        found = {"nnodes": host.nodes, "rdzv_endpoint": host.endpoint, "node_rank": host.rank}
        if not (given["include"] or given["exclude"]):  # which say how many devices
            found["num_accelerators"] = host.ranks
        given.update({name: value for name, value in found.items() if given[name] in (None, "")})


def _require(options: Options) -> None:
    """Raise UserError for flags that exclude each other and for values out of range."""
    if options.include and options.exclude:
        raise UserError("--include and --exclude: give one of them")
    if (options.include or options.exclude) and (options.num_nodes or options.num_accelerators):
        raise UserError("--num_nodes and --num_accelerators cannot be combined with --include or --exclude")
    for name in ("max_restarts", "min_ranks", "num_accelerators", "num_nodes", "node_rank"):
        value = getattr(options, name)
        least = 0 if name in ("max_restarts", "node_rank") else 1
        most = MOST_SLOTS if name == "num_accelerators" else LARGEST
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
        if value is not None and value > most:
            raise UserError(f"--{name} {value}: must be at most {most:,}")
    for name in ("master_port", "ssh_port"):
        port = getattr(options, name)
        if port is not None and not 0 < port < 2**16:
            raise UserError(f"--{name} {port}: must be a port, from 1 to {2**16 - 1}")
    _require_meeting(options)
    for name in ("master_addr", "local_addr"):
        if (given := getattr(options, name)) and not is_host(given):
            raise UserError(f"--{name} {given}: must be a host's name or address")
    if options.hostfile and not usable_file(options.hostfile):
        raise UserError(f"--hostfile {options.hostfile}: no such file")


def _require_meeting(options: Options) -> None:
    """Raise UserError for wrong or missing flags of several hosts that meet."""
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", options.nnodes or "1")
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise UserError(f"--nnodes {options.nnodes}: must be a number of hosts, or the least and the largest, as 2:4")
    if options.nnodes not in (None, "1", "1:1") and not options.rdzv_endpoint:
        raise UserError(f"--nnodes {options.nnodes}: give --rdzv_endpoint HOST:PORT too, the same on all hosts")
    host, _, port = options.rdzv_endpoint.rpartition(":")
    is_port = re.fullmatch(r"[0-9]{1,5}", port) is not None and 0 < int(port) < 2**16
    if options.rdzv_endpoint and not (is_port and is_host(host)):
        raise UserError(f"--rdzv_endpoint {options.rdzv_endpoint}: must be HOST:PORT")
    chosen = [name for name in ("hostfile", "num_nodes") if getattr(options, name)]
    if options.rdzv_endpoint and chosen:
        text = "give one of them; with --rdzv_endpoint each host starts its own"
        raise UserError(f"--{chosen[0]} and --rdzv_endpoint: {text}")


def _parser() -> LaunchParser:
    parser = LaunchParser("launch", DESCRIPTION, EXAMPLE, allow_abbrev=False)
    add_launch_flags(parser)
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def add_launch_flags(parser: argparse._ActionsContainer, *, of_any_script: bool = True) -> None:
    """Add the flags of a launch; those about how a script of the user's is started only with `of_any_script`."""
    for each in fields(Options):
        about = each.metadata
        if not about or (each.name in OF_SCRIPTS and not of_any_script):
            continue
        kind = about["kind"]
        flags = sorted([f"--{each.name}", *about["names"]], key=lambda name: name[1] == "-")  # -H before --hostfile
        more = {"action": Boolean} if kind is bool else {"type": _TYPES[kind], "metavar": about["metavar"]}
        parser.add_argument(*flags, default=each.default, help=about["help"], **more)
    for names, takes in other_programs().ignored_by_launch.items():
        ignored = {"action": Boolean} if takes == "true or false" else {"choices": None if takes == "any" else takes}
        parser.add_argument(*names, dest=IGNORED, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **ignored)


def usable_file(text: str) -> bool:
    """Return whether a path is that of a file."""
    try:
        return usable_path(text).is_file()
    except (OSError, ValueError):
        return False


def is_host(name: str) -> bool:
    """Return whether a text may be a host name or an address (IPv6 also in brackets)."""
    if name.startswith("[") or ":" in name:
        bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
        try:
            return ipaddress.ip_address(bare.partition("%")[0]).version == 6
        except ValueError:
            return False
    try:
        return re.fullmatch(r"[\w.-]+", name) is not None and len(name.encode("idna")) < 254
    except UnicodeError:  # a part of the name is empty or longer than 63 characters
        return False
