"""Write the device file of this machine's CPU, from measurements of one rank and of the links between several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.hardware import GIB
from harness.planner.layer_time import OPERATIONS

MODULE = "harness.parallel.speed"
LIMIT_S = 120.0


def calibrate(path: Path) -> None:
    """Measure this machine, which takes less than a minute, and write its device file.

    Raises UserError if a measurement fails, or if the file cannot be written.
    """
    if not path.absolute().parent.is_dir():
        raise UserError(f"--calibrate {path}: no such directory")
    rank = _measured("rank", _cores())
    links = {ranks: _measured("link", ranks) for ranks in (2, 2 * _cores())}
    try:
        path.write_text(json.dumps(device(rank, links), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--calibrate {path}: cannot be written: {(error.strerror or '').lower()}") from None


def device(rank: JsonObject, links: Mapping[int, JsonObject]) -> JsonObject:
    """Return the content of the file: the measurements, and the system's number of cores and size of memory.

    Args:
        links: link by number of ranks: between two ranks, and between more ranks than there are cores.
    """
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    peak = {name: rank[name] / 1e12 for name in ("fp32", "bf16", "fp16")}
    through, crowded = (_link(links[ranks]) for ranks in (min(links), max(links)))
    numbers: JsonObject = {
        "cores": _cores(),
        "memory_gib": gib,
        "context_gib": 0.5,
        "memory_gb_per_second": rank["memory"] / 1e9,
        "memory_efficiency": 1,
        "tflops": peak,
        "matmul_efficiency": dict.fromkeys(peak, 1),
        "attention_efficiency": rank["attention"] / rank["fp32"],
        "compute_units": 1,
        "kernel_seconds": 1e-6,
        "node": {"devices": 1024, **through},
        "crowded": {"ranks": max(links), **crowded},
        "network": through,
        "host": {
            "dispatch_seconds": rank["layer"] / (3 * OPERATIONS),  # backward issues twice as many as forward
            "gb_per_second": rank["memory"] / 1e9,
            "memory_gib": gib,
            "memory_gb_per_second": rank["memory"] / 1e9,
        },
    }
    return {"name": "this machine's CPU, one core for each rank", **_with_source(numbers)}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _link(measured: JsonObject) -> JsonObject:
    rate = measured["bytes_per_second"] / 1e9
    return {"gb_per_second": rate, "efficiency": 1, "hop_seconds": measured["hop_seconds"]}


def _with_source(numbers: JsonObject) -> JsonObject:
    source = "measured on this machine"
    return {
        key: _with_source(value) if isinstance(value, dict) else {"value": value, "source": source}
        for key, value in numbers.items()
    }


def _measured(what: str, ranks: int) -> JsonObject:
    """Have some ranks measure something together, and return the first one's result. Raises UserError if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [sys.executable, "-m", MODULE, what, str(number), str(ranks), f"{folder}/meeting"]
            for number in range(ranks)
        ]
        said, failed = _run(commands)
    if failed:
        lines = said[0][1].strip().splitlines() or ["no reason given"]
        raise UserError(f"--calibrate: a measurement failed: {lines[-1]}")
    found: JsonObject = json.loads(said[0][0])
    return found


def _run(commands: list[list[str]]) -> tuple[list[tuple[str, str]], bool]:
    """Run commands at the same time; return the output of each, with its errors, and whether one failed."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    said = []
    try:
        for process in running:
            said.append(process.communicate(timeout=LIMIT_S))
    except subprocess.TimeoutExpired:
        raise UserError(
            f"--calibrate: a measurement took more than {LIMIT_S:g} s: try again on a quiet machine"
        ) from None
    finally:
        for process in running:
            process.kill()
    return said, any(process.returncode for process in running)
