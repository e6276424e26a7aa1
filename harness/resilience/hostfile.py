"""Read a hostfile: the hosts of a launch and their slots."""

from __future__ import annotations

import re
from pathlib import Path

from harness.config.values.json_file import regular_bytes
from harness.errors import UserError
from harness.resilience.placement import Host

MOST_SLOTS = 1024  # ranks of a host: more is a typing error, and would start so many processes
HOST_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)")


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read a hostfile of lines `host slots=N`; blank lines and lines that start with # are skipped, as in DeepSpeed.

    Raises UserError, with the line number, for any other line or a host that appears twice; and if there is no host.
    """
    try:
        lines = regular_bytes(Path(path)).decode().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read hostfile {path}: {error}") from None
    hosts: dict[str, Host] = {}
    for number, text in enumerate(map(str.strip, lines), start=1):
        if not text or text.startswith("#"):
            continue
        match = HOST_LINE.match(text)
        if match is None or int(match["slots"][:9]) < 1:
            raise UserError(f"{path}:{number}: {text!r} is not `host slots=N` with N of at least 1")
        if int(match["slots"][:9]) > MOST_SLOTS:
            raise UserError(f"{path}:{number}: {text[:80]!r}: a host has at most {MOST_SLOTS:,} slots")
        if match["name"] in hosts:
            raise UserError(f"{path}:{number}: host {match['name']} appears twice: add its slots up in one line")
        hosts[match["name"]] = Host(name=match["name"], slots=int(match["slots"]))
    if not hosts:
        raise UserError(f"hostfile {path} contains no host: write one `host slots=N` per line")
    return tuple(hosts.values())
