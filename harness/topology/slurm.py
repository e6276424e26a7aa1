"""Read Slurm's description of a job step: tasks on each host, lists of hosts, allocations."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping

from harness.errors import UserError

ANSWER_S = 30  # timeout of a command; Slurm's controller may be busy


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process as a task; the shell of a batch job or of salloc is not one."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


def first_host(hosts: str) -> str:
    """Return the first name in a Slurm list of hosts: `n07` for `n[07-09,12],gpu1`."""
    # Up to the first comma outside of brackets.
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group() if match else hosts)


def tasks_on_node(counts: str, node: int) -> int | None:
    """Return the number of tasks on a node from a list such as `2(x3),1`; None if it has no such node."""
    expanded: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        expanded += [int(count)] * int(times or 1)
    return expanded[node] if node < len(expanded) else None


def address_of(node: str) -> str | None:
    """Return the network address of a Slurm node, whose name need not be a host name; None if unknown."""
    if shutil.which("scontrol") is None:
        return None
    match = re.search(r"NodeAddr=(\S+)", ask("scontrol", "show", "node", node))
    return match.group(1) if match else None


def ask(*command: str) -> str:
    """Return the output of a Slurm command. Raises UserError if it cannot be started or does not answer."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_S,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"`{' '.join(command)}` has not answered for {ANSWER_S} s: ask whether Slurm is up") from error
    except OSError as error:
        raise UserError(f"`{' '.join(command)}` cannot be started: {error.strerror or error}") from error
    return done.stdout
