"""The device file of this machine, measured by its own ranks, as a user asks for it."""

from pathlib import Path

import pytest

from harness.cli import main
from harness.planner.hardware import load_hardware

pytestmark = pytest.mark.ranks


@pytest.mark.thorough
def test_the_planner_plans_for_the_machine_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "here.json"
    assert main(["plan", "--calibrate", str(file)]) == 0
    two, four = load_hardware(str(file), 2), load_hardware(str(file), 4)
    assert 1e9 < four.flops["fp32"] <= two.flops["fp32"] < 1e13
    assert 1e-6 < two.node.hop_seconds < 1e-1
    capsys.readouterr()
    assert main(["plan", "--model", "tiny-llama", "--world_size", "2", "--hardware", str(file)]) == 0
    assert "tokens/s" in capsys.readouterr().out
