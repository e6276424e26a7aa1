"""The script for a machine with a GPU, on the simulated device: it ends well, and its JSON holds what it promises."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

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


def test_a_part_that_fails_or_has_no_time_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    clock = import_module("gpu").Clock
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'RuntimeError: out of memory' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert clock(60).run(["--part", "harness"]) == "failed: RuntimeError: out of memory"
    assert clock(10).run(["--part", "harness"]) == "left out: the time is up"
