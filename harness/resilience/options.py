"""The flags of `ds-harness launch`: its own, and those of the `deepspeed` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness.errors import UserError

HOSTFILE = "/job/hostfile"  # where the `deepspeed` command looks
EXAMPLE = """example:
  ds-harness launch --max_restarts 20 --num_accelerators 8 scripts/train.py --deepspeed_config pipeline_3d \\
      --max_steps 1000 --save_steps 100 --output_dir runs/a"""
USAGE = f"usage: ds-harness launch [flags] SCRIPT ARGUMENTS (see --help)\n\n{EXAMPLE}"
DESCRIPTION = """Start a training script on all devices, of one host or several, and keep it going.

Signals go to the ranks: they save and stop, and the exit code is 128 + the signal's number. With --max_restarts a run
that fails goes on from its newest checkpoint, on the hosts that answer, with the same global batch."""

# Flags of the `deepspeed` command that only it can follow, with the number of their values.
DEEPSPEED_ONLY = {
    "--launcher": 1,
    "--launcher_args": 1,
    "--node_rank": 1,
    "--no_ssh": 0,
    "--save_pid": 0,
    "--enable_each_rank_log": 1,
    "--autotuning": 1,
    "--bind_cores_to_rank": 0,
    "--bind_core_list": 1,
    "--venv_script": 1,
}


# Flags that the `deepspeed` command does not know, with the number of their values.
OWN = {"--max_restarts": 1, "--min_ranks": 1, "--no_standby": 0, "--slurm": 1, "--slurm_seconds": 1}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to start a run, and how often.

    Attributes:
        script: what runs on each rank, with its arguments.
        flags: what stands before it.
        deepspeed_only: the flags that need the `deepspeed` command itself.
    """

    script: tuple[str, ...]
    flags: tuple[str, ...]
    max_restarts: int
    min_ranks: int | None
    num_accelerators: int | None
    num_nodes: int | None
    hostfile: str | None
    include: str
    exclude: str
    master_addr: str
    master_port: int | None
    ssh_port: int | None
    module: bool
    no_python: bool
    no_local_rank: bool
    no_standby: bool
    deepspeed_only: tuple[str, ...]
    slurm: str | None
    slurm_seconds: int

    @property
    def for_deepspeed(self) -> list[str]:
        """What the `deepspeed` command is called with: the flags that it knows, and the script."""
        kept: list[str] = []
        skips = False
        for word in self.flags:
            name, equals, _ = word.partition("=")
            if not skips and name not in OWN:
                kept.append(word)
            skips = not skips and not equals and OWN.get(name) == 1
        return [*kept, *self.script]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def read_options(argv: Sequence[str]) -> Options:
    """Return the flags before the script, and the script with its arguments. UserError for what cannot be."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    start = len(argv) - len(given.pop("arguments")) - 1
    start -= argv[start] != given.pop("script")  # argparse swallows a "--" behind the script
    only = [name for name in DEEPSPEED_ONLY if given.pop(name.removeprefix("--"))]
    for name in ("no_ssh_check", "force_multi", "quiet", "log_level"):
        given.pop(name)
    options = Options(script=tuple(argv[start:]), flags=tuple(argv[:start]), deepspeed_only=tuple(only), **given)
    _require(options)
    return options


def _require(options: Options) -> None:
    """Raise UserError for flags that exclude each other, and for values out of range."""
    if options.include and options.exclude:
        raise UserError("--include and --exclude: give one of them")
    if (options.include or options.exclude) and (options.num_nodes or options.num_accelerators):
        raise UserError("--num_nodes and --num_accelerators cannot be combined with --include or --exclude")
    for name in ("max_restarts", "min_ranks", "num_accelerators", "num_nodes", "slurm_seconds"):
        value, least = getattr(options, name), 0 if name == "max_restarts" else 1
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    for name in ("master_port", "ssh_port"):
        port = getattr(options, name)
        if port is not None and not 0 < port < 2**16:
            raise UserError(f"--{name} {port}: must be a port, from 1 to {2**16 - 1}")
    if options.deepspeed_only and options.max_restarts:
        only = options.deepspeed_only[0]
        raise UserError(f"{only} cannot be combined with --max_restarts: leave out one of them")
    if options.hostfile and not Path(options.hostfile).is_file():
        raise UserError(f"--hostfile {options.hostfile}: no such file")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ds-harness launch",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--max_restarts", type=int, default=0, metavar="N", help="start again up to N times (default: 0)")
    add("--min_ranks", type=int, metavar="K", help="wait for hosts rather than go on with fewer ranks (default: 1)")
    add("--num_accelerators", "--num_gpus", type=int, metavar="N", help="ranks on each host (default: all devices)")
    add("--num_nodes", type=int, metavar="N", help="use the first N hosts")
    add("-H", "--hostfile", metavar="FILE", help=f"lines `host slots=N` (default: {HOSTFILE} if there is one)")
    add("-i", "--include", default="", metavar="SPEC", help="hosts and devices to use, as host-a@host-b:0,2")
    add("-e", "--exclude", default="", metavar="SPEC", help="hosts and devices not to use")
    add("--master_addr", default="", metavar="A", help="where rank 0 listens (default: the first host)")
    add("--master_port", type=int, metavar="P", help="its port (default: a free one at each start)")
    add("--ssh_port", type=int, metavar="P", help="port of sshd on the other hosts")
    add("--module", action="store_true", help="the script is a module, as in `python -m`")
    add("--no_python", action="store_true", help="the script is a command of its own")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    add("--no_standby", action="store_true", help="keep no process ready on each host for the next restart")
    add("--slurm", metavar="FILE", help="write a batch file for sbatch instead, for --num_nodes hosts")
    add("--slurm_seconds", type=int, default=120, metavar="S", help="save so long before Slurm's time limit")
    for name, values in DEEPSPEED_ONLY.items():
        if values:
            add(name, default="", help=argparse.SUPPRESS)
        else:
            add(name, action="store_true", help=argparse.SUPPRESS)
    for names in (("--no_ssh_check",), ("--force_multi",), ("-q", "--quiet")):
        add(*names, action="store_true", help=argparse.SUPPRESS)
    add("--log_level", default="", help=argparse.SUPPRESS)
    add("script", help="the training script")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser
