"""Write the device file of this machine's CPU, from measurements of one rank and of the links between several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from harness.atomic import write_output
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.hardware import GIB
from harness.planner.layer_time import OPERATIONS
from harness.topology.processes import own_python

MODULE = "harness.extras.speed"
LIMIT_S = 360.0


def calibrate(path: Path) -> None:
    """Measure this machine, which takes less than a minute, and write its device file.

    Raises UserError if a measurement fails, or if the file cannot be written.
    """
    if not path.absolute().parent.is_dir():
        raise UserError(f"--calibrate {path}: no such directory")
    rank, links = _measured(_cores())
    try:
        write_output(path, json.dumps(device(rank, links), indent=2) + "\n")
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
            "dispatch_seconds": rank["layer"] / (3 * OPERATIONS),  # backward issues twice as many operations as forward
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


def _measured(cores: int) -> tuple[JsonObject, dict[int, JsonObject]]:
    """Let ranks measure together; return the measurements of a rank, and of a link by its number of ranks.

    Raises UserError if one fails.
    """
    process = subprocess.Popen(
        own_python("-m", MODULE, str(cores)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"--calibrate: the measurements took more than {LIMIT_S:g} s: try again on a quiet machine"
        ) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks
    if process.returncode:
        lines = errors.strip().splitlines() or ["no reason given"]
        raise UserError(f"--calibrate: a measurement failed: {lines[-1]}")
    found: JsonObject = json.loads(said)
    return found["rank"], {int(ranks): link for ranks, link in found["links"].items()}
