"""Writes the device file of this machine's CPU, from measurements of one rank and of the link between two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.hardware import GIB

MODULE = "harness.parallel.speed"
LIMIT_S = 120.0


def calibrate(path: Path) -> None:
    """Measure this machine, which takes less than a minute, and write its device file.

    UserError where a measurement fails, or where the file cannot be written.
    """
    if not path.absolute().parent.is_dir():
        raise UserError(f"--calibrate {path}: no such directory")
    command = [sys.executable, "-m", MODULE]
    rank = _measured([command])
    with tempfile.TemporaryDirectory() as folder:
        link = _measured([[*command, str(number), f"{folder}/meeting"] for number in range(2)])
    try:
        path.write_text(json.dumps(device(rank, link), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--calibrate {path}: cannot be written: {(error.strerror or '').lower()}") from None


def device(rank: JsonObject, link: JsonObject) -> JsonObject:
    """Return the content of the file: what was measured, and what the system says of cores and memory."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    peak = {name: rank[name] / 1e12 for name in ("fp32", "bf16", "fp16")}
    through = {"gb_per_second": link["bytes_per_second"] / 1e9, "efficiency": 1, "hop_seconds": link["hop_seconds"]}
    numbers: JsonObject = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
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
        "network": through,
        "host": {
            "dispatch_seconds": rank["operation"],
            "gb_per_second": rank["memory"] / 1e9,
            "memory_gib": gib,
            "memory_gb_per_second": rank["memory"] / 1e9,
        },
    }
    return {"name": "this machine's CPU, one core for each rank", **_with_source(numbers)}


def _with_source(numbers: JsonObject) -> JsonObject:
    source = "measured on this machine"
    return {
        key: _with_source(value) if isinstance(value, dict) else {"value": value, "source": source}
        for key, value in numbers.items()
    }


def _measured(commands: list[list[str]]) -> JsonObject:
    """Run commands side by side, and return what the first prints. UserError where one fails."""
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
    if any(process.returncode for process in running):
        lines = said[0][1].strip().splitlines() or ["no reason given"]
        raise UserError(f"--calibrate: a measurement failed: {lines[-1]}")
    found: JsonObject = json.loads(said[0][0])
    return found
