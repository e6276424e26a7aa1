"""The device file of this machine's CPU."""

import json

import pytest
import torch

from harness.cli import main
from harness.extras import speed
from harness.planner import calibrate
from harness.planner.calibrate import device
from harness.planner.hardware import GIB, load_hardware


@pytest.fixture(scope="module")
def measured():
    """One rank's figures, from sizes that take no time, and a link."""
    rates = {name: speed.matmul_flops(dtype, size=64) for name, dtype in speed.DTYPES.items()}
    rank = {**rates, "attention": speed.attention_flops(length=64, heads=1), "memory": speed.copied_bytes(2**16)}
    link, crowded = {"bytes_per_second": 1e9, "hop_seconds": 1e-4}, {"bytes_per_second": 2e8, "hop_seconds": 3e-4}
    return device(rank | {"layer": speed.narrow_layer_seconds()}, {2: link, 4: crowded})


def test_measurements_are_plausible(measured):
    assert 1e-5 < measured["tflops"]["fp32"]["value"] < 10
    assert 1e-8 < measured["host"]["dispatch_seconds"]["value"] < 1e-2


def test_ranks_share_the_cores_and_the_memory(measured, tmp_path):
    file = tmp_path / "here.json"
    measured["cores"]["value"] = 2
    file.write_text(json.dumps(measured))
    one, two, four = (load_hardware(str(file), ranks) for ranks in (1, 2, 4))
    assert one.flops == two.flops
    assert four.flops["fp32"] == pytest.approx(two.flops["fp32"] / 2)
    assert four.memory_bytes == pytest.approx(one.memory_bytes / 4)
    assert (one.node, two.node.bytes_per_second, two.node.hop_seconds) == (two.node, 1e9, 1e-4)
    assert (four.node.bytes_per_second, four.node.hop_seconds) == pytest.approx((2e8, 3e-4))
    eight = load_hardware(str(file), 8).node
    assert (eight.bytes_per_second, eight.hop_seconds) == pytest.approx((1e8, 6e-4))
    assert one.memory_bytes == pytest.approx(measured["memory_gib"]["value"] * GIB)


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(capsys, tmp_path):
    assert main(["plan", "--calibrate", str(tmp_path / "none" / "here.json")]) == 1
    assert "no such directory" in capsys.readouterr().err


def test_threads_are_left_alone():
    before = torch.get_num_threads()
    speed.matmul_flops(torch.float32, size=8)
    assert torch.get_num_threads() == before


def test_a_measurement_that_fails_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "MODULE", "harness.parallel.none")
    assert main(["plan", "--calibrate", str(tmp_path / "here.json")]) == 1
    said = capsys.readouterr().err
    assert "a measurement failed: " in said and "harness.parallel.none" in said and said.count("\n") == 1
