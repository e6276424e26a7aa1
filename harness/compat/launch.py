"""Start two ranks that fill rows of the matrix, and go on after a family that kills or stalls them.

Starting costs ten seconds of imports, so one launch runs all families. Rows are lines of JSON in a file; a family
that is in it already is not run again, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from harness.hf.matrix import CELLS
from harness.topology.env import LOOPBACK, free_port

RANKS = 2
START_S = 90.0  # for imports, on top of the first family's time


def run_families(
    families: Sequence[str], results: Path, *, limit_s: float, report: Callable[[str, dict[str, str]], None]
) -> dict[str, dict[str, str]]:
    """Return the rows of `families`, and report each as soon as it is known.

    A family that takes longer than `limit_s` seconds is given up; its row says so.
    """
    _end_last_line(results)
    reported: set[str] = set()
    while True:
        rows = read_rows(results)
        for family in families:
            if family in rows and family not in reported:
                reported.add(family)
                report(family, rows[family])
        waiting = [family for family in families if family not in rows]
        if not waiting:
            return {family: rows[family] for family in families}
        for family, row in _launch(waiting, results, limit_s):
            reported.add(family)
            report(family, row)
        rows = read_rows(results)
        if (stuck := next((family for family in waiting if family not in rows), None)) is not None:
            reason = f"not tried: its ranks died or gave no answer within {limit_s:.0f} s"
            _append(results, stuck, dict.fromkeys(CELLS, reason))


def read_rows(results: Path) -> dict[str, dict[str, str]]:
    """Return the rows of a results file; a last line that was cut off is left out."""
    rows = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row.pop("family")] = row
    return rows


def _end_last_line(results: Path) -> None:
    """End a last line that was cut off, so that the next row does not become a part of it."""
    content = results.read_bytes() if results.exists() else b""
    if content and not content.endswith(b"\n"):
        with results.open("a", encoding="utf-8") as file:
            file.write("\n")


def _append(results: Path, family: str, row: dict[str, str]) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"family": family, **row}) + "\n")


def _launch(families: Sequence[str], results: Path, limit_s: float) -> Iterator[tuple[str, dict[str, str]]]:
    """Run two ranks until they end, one of them fails, or no row comes any more; gives the rows as they come."""
    known = set(read_rows(results))
    with results.with_suffix(".log").open("ab") as output:
        port = free_port()
        ranks = [_start(rank, port, results, families, output) for rank in range(RANKS)]
        deadline = time.monotonic() + START_S + limit_s
        try:
            ended = False
            while not ended and time.monotonic() < deadline:
                codes = [rank.poll() for rank in ranks]
                ended = None not in codes or any(code not in (None, 0) for code in codes)
                for family, row in read_rows(results).items():  # also after the end: the last row
                    if family not in known:
                        known.add(family)
                        deadline = time.monotonic() + limit_s
                        yield family, row
                time.sleep(0.2)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _start(rank: int, port: int, results: Path, families: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    quiet = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
    variables = {**place, **quiet, "MASTER_ADDR": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "harness.compat.cells", str(results), *families]
    return subprocess.Popen(
        ["env", *(f"{name}={value}" for name, value in variables.items()), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
