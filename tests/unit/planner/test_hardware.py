"""Device files: what is read, what is refused in one line, and what ranks share of a host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.planner.hardware import FOLDER, GIB, Link, device_of, load_hardware, names, read_device

NONE = object()


def content(**changes: Any) -> dict[str, Any]:
    """The packaged H100 with other values by dotted name; NONE takes one away."""
    device: dict[str, Any] = json.loads((FOLDER / "h100.json").read_text("utf-8"))
    for name, value in changes.items():
        *path, last = name.split("__")
        section = device
        for key in path:
            section = section[key]
        section.pop(last) if value is NONE else section.update({last: value})
    return device


def test_units_of_a_file_become_bytes_and_seconds() -> None:
    link = {"gb_per_second": 400, "efficiency": 0.5, "hop_seconds": 1e-6}
    device = device_of(
        content(memory_gib=10, memory_gb_per_second=100, memory_efficiency=0.9, node=link | {"devices": 4}), "x"
    )
    assert (device.memory_bytes, device.memory_bytes_per_second) == (10 * GIB, pytest.approx(90e9))
    assert device.node == Link(bytes_per_second=200e9, hop_seconds=1e-6)
    assert device.limit_bytes == device.memory_bytes - device.context_bytes
    assert device.reached_flops("bf16") == pytest.approx(989.4e12 * 0.728)
    assert device.node_size == 4 and not device.is_host


@pytest.mark.parametrize(("devices", "ranks", "share"), [(8, None, 1), (8, 16, 1), (8, 2, 4), (8, 1, 8), (72, 1, 4)])
def test_fewer_ranks_than_devices_share_the_memory_of_a_whole_host(devices: int, ranks: int | None, share: int) -> None:
    device = content(node__devices=devices, host__memory_gib=100)
    if devices == 72:  # a link between several hosts
        device["host"]["devices"] = 4
    assert device_of(device, "x", ranks).host_memory_bytes == share * 100 * GIB


@pytest.mark.parametrize(("changes", "rate"), [({}, 0.0), ({"node__exchange_efficiency": {"value": 0.25}}, 112.5e9)])
def test_a_file_may_say_what_an_all_to_all_reaches(changes: dict[str, Any], rate: float) -> None:
    assert device_of(content(**changes), "x").node.exchange_bytes_per_second == rate


def test_a_number_may_stand_alone_or_with_its_source() -> None:
    alone = device_of(content(memory_gib=10), "x")
    assert alone.memory_bytes == device_of(content(memory_gib={"value": 10, "source": "counted"}), "x").memory_bytes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param({"memory_gib": NONE}, "memory_gib is null", id="left out"),
        pytest.param({"memory_gib": 0}, "memory_gib is 0", id="nothing"),
        pytest.param({"memory_gib": -1}, "memory_gib is -1", id="less than nothing"),
        pytest.param({"memory_gib": "80"}, 'memory_gib is "80"', id="text"),
        pytest.param({"memory_gib": True}, "memory_gib is true", id="a truth value"),
        pytest.param({"memory_gib": float("inf")}, "memory_gib is Infinity", id="without end"),
        pytest.param({"memory_gib": float("nan")}, "memory_gib is NaN", id="no number"),
        pytest.param({"memory_gib": {"source": "a datasheet"}}, "memory_gib is null", id="a source alone"),
        pytest.param({"node__hop_seconds": None}, r"node\.hop_seconds is null", id="a link's"),
        pytest.param({"host": []}, r"host\.dispatch_seconds is null", id="no section"),
        pytest.param({"matmul_efficiency__fp16": NONE}, r"matmul_efficiency\.fp16 is null", id="a precision's share"),
        pytest.param({"tflops__bf16": {"value": 0}}, r"tflops\.bf16 is 0", id="a rate of nothing"),
        pytest.param({"tflops__fp32": NONE}, "no tflops of fp32 and bf16", id="no fp32"),
        pytest.param({"tflops": 900}, "no tflops of fp32 and bf16", id="one rate for all"),
        pytest.param(
            {"compute_units": 0.5}, "compute_units is 0.5: write a whole number from 1", id="half a processor"
        ),
        pytest.param({"node__devices": 0.5}, r"node\.devices is 0.5: write a whole", id="half a device"),
        pytest.param({"node__devices": 7.5}, r"node\.devices is 7.5: write a whole", id="seven and a half"),
        pytest.param({"cores": 0}, "cores is 0", id="a host without cores"),
    ],
)
def test_a_value_that_cannot_be_meant_is_told_with_its_place(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=rf"^mine\.json: {told}"):
        device_of(content(**changes), "mine.json")


@pytest.mark.parametrize("other", [[], None, 3, "h100", {}], ids=repr)
def test_a_file_that_is_no_device_is_told(other: object) -> None:
    with pytest.raises(UserError, match=r"^mine\.json: no tflops of fp32 and bf16"):
        device_of(other, "mine.json")


@pytest.mark.parametrize("name", ["h-100", "", ".", "no/such.json", "\0", "H100.json"])
def test_a_device_that_is_not_there_is_told_with_those_that_are(name: str) -> None:
    with pytest.raises(UserError, match=r"unknown: use one of .*a100-40gb, .*, h100, .*or the path of a device file"):
        read_device(name)


@pytest.mark.parametrize("text", ["", "{", "\xff"])
def test_a_file_that_is_no_json_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"mine\.json: unknown"):
        read_device(str(tmp_path / "mine.json"))


def test_a_packaged_name_has_any_case_and_goes_before_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("h100").write_text("{}")
    assert load_hardware("H100").name == load_hardware("h100").name == "NVIDIA H100 SXM 80GB"


def test_a_file_without_a_name_is_called_by_its_path() -> None:
    assert device_of(content(name=NONE), "mine.json").name == "mine.json"


@pytest.mark.parametrize("name", names())
def test_every_constant_of_a_packaged_device_has_its_source(name: str) -> None:
    def sourced(value: object) -> bool:
        if not isinstance(value, dict):
            return False
        return bool(value["source"]) if "value" in value else all(map(sourced, value.values()))

    device, _ = read_device(name)
    assert [key for key, value in device.items() if key != "name" and not sourced(value)] == []
    sixteen, whole = load_hardware(name).flops["bf16"], load_hardware(name).flops["fp32"]
    assert name == "cpu" or sixteen >= whole


def test_ranks_up_to_the_cores_slow_each_other_down_by_nothing_but_memory() -> None:
    host = content(cores=4, compute_units=1)
    one, four, eight = (device_of(host, "host", ranks) for ranks in (1, 4, 8))
    assert one.is_host
    assert (one.flops, one.dispatch_seconds, one.node) == (four.flops, four.dispatch_seconds, four.node)
    assert four.memory_bytes == one.memory_bytes / 4
    assert eight.flops["bf16"] == one.flops["bf16"] / 2
    assert (eight.dispatch_seconds, eight.node.hop_seconds) == (2 * one.dispatch_seconds, 2 * one.node.hop_seconds)
    assert (one.crowding, four.crowding, eight.crowding) == (1, 1, 2)
    assert eight.network == one.network  # other hosts have cores of their own


@pytest.mark.parametrize("name", [name for name in names() if name != "cpu"])
def test_float32_runs_at_the_rate_of_the_ordinary_cores(name: str) -> None:
    """torch leaves TF32 off: products in float32 run at a fraction of the rate of bf16."""
    gpu = load_hardware(name)
    assert gpu.flops["fp32"] < 200e12 and gpu.flops["fp32"] <= gpu.flops["bf16"] / 2
    if "tf32" in gpu.flops:
        assert gpu.in_tf32.flops["fp32"] == gpu.flops["tf32"] >= gpu.flops["fp32"]
        assert gpu.in_tf32.reached_flops("bf16") == gpu.reached_flops("bf16")
    else:
        assert gpu.in_tf32 is gpu
