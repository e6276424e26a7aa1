"""The script for a machine with a GPU, on the simulated device: it ends well, and its JSON holds what it promises."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from tests.support.ranks import ROOT, script_on_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.thorough
def test_it_compares_and_measures(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    words = ["--small", "--output", output, "--steps", "4", "--programs", "harness", "harness, Liger", "PyTorch"]
    done = script_on_ranks(1, ROOT / "scripts/bench/gpu.py", *words, timeout_s=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert report["device"] == "simulated device" and report["machine"]["torch"]
    assert {name: row for name, row in report["correctness"].items() if not row["agree"]} == {}
    assert {"ZeRO-3", "bf16", "optimizer on the host"} <= report["correctness"].keys()
    for program in ("harness", "PyTorch"):
        row = report["speed"][program]
        assert row["tokens_per_second"] > 0 and row["mfu_of_measured_product"] > 0 and row["peak_gib"] > 0, row
    assert report["speed"]["harness, Liger"]["failed"] == "left out: liger-kernel is not installed"
    assert report["speed"]["harness"]["expected"]["memory_gib"]


def on_cpu(run: str, output: Path, *words: str) -> list[str]:
    script = str(ROOT / "scripts/bench/gpu.py")
    return [sys.executable, script, "--small", "--run", run, "--steps", "4", "--output", str(output), *words]


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGKILL, -signal.SIGKILL)])
def test_sizes_that_were_ended_go_on_with_those_that_are_missing(number: int, code: int, tmp_path: Path) -> None:
    output, names = tmp_path / "gpu.json", ["8B, LoRA", "2.5B, 8 experts"]
    command = on_cpu("sizes", output, "--programs", *names)

    def known() -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = json.loads(output.read_text()).get("sizes", {}) if output.exists() else {}
        return found

    ended = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parts: list[psutil.Process] = []
    while not known() or not parts:
        assert ended.poll() is None
        time.sleep(0.5)
        parts = psutil.Process(ended.pid).children()
    ended.send_signal(number)
    assert ended.wait(60) == code and list(before := known()) == names[:1]
    assert psutil.wait_procs(parts, 60)[1] == []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert list(known()) == names and known()[names[0]] == before[names[0]]
    for name, row in known().items():
        assert "failed" not in row, (name, row)
        assert 0 < row["mfu_of_datasheet"] < row["mfu_whole_attention"] and row["mfu_of_measured_product"] > 0
        rates = f"{row['mfu_of_datasheet']:.1%} | {row['mfu_whole_attention']:.1%}"
        assert f"| {name} | {row['tokens_per_second']:,.0f} | {rates} |" in done.stdout


@pytest.mark.thorough
def test_a_step_is_profiled_without_a_gpu_too(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    done = subprocess.run(on_cpu("where", output, "--programs", "harness"), capture_output=True, text=True, check=True)
    report = json.loads(output.read_text())
    assert {"products", "attention", "update", "layer", "loss"} <= report["operations"].keys()
    traced = report["traced"]["harness"]
    assert 0 < traced["busy"] <= traced["milliseconds"] and traced["by_kind"]["products"] > 0
    assert report["graphs_by_step"][0] > 0 and report["graphs_by_step"][-1] == report["graphs_by_step"][-2]
    assert f"| harness | {traced['milliseconds']:.0f} |" in done.stdout


def test_a_part_that_fails_or_has_no_time_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    clock = import_module("gpu").Clock
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'RuntimeError: out of memory' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert clock(60).run(["--part", "harness"]) == "failed: RuntimeError: out of memory"
    assert clock(10).run(["--part", "harness"]) == "left out: the time is up"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    slow = clock(60)
    slow.longest_s = 0.5
    assert slow.run(["--part", "harness"]) == "ended after 0.5 s: it took too long"
