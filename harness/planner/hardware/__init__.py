"""The devices that the planner knows (one JSON each in this folder), and how their files are read.

In the file every constant has its source beside it: a datasheet, a benchmark of that constant, or "assumed". To add a
device, a user writes such a file and gives its path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from harness.config.values.json_file import read_json
from harness.config.values.json_object import JsonObject
from harness.errors import UserError

FOLDER = Path(__file__).parent
GIB = 2**30
# Share of a device's memory that a recommended layout leaves free: the predicted peak is more than 3% too low for one
# published run in six, and fragmentation takes memory too.
HEADROOM = 0.08


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between devices.

    Attributes:
        bytes_per_second: rate at which a device sends in collectives.
        hop_seconds: latency from one device to the next.
        exchange_bytes_per_second: rate in an all-to-all; 0 means the same rate.
    """

    bytes_per_second: float
    hop_seconds: float
    exchange_bytes_per_second: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)  # compared by identity: results are cached by device
class Hardware:
    """One device, its host and its links.

    Attributes:
        context_bytes: memory of the driver's context and the communicators, which torch does not allocate.
        flops: peak FLOP/s by precision.
        matmul_efficiency: share of that peak in the largest matrix products.
        compute_units: processors that share the tiles of a matrix product.
        attention_efficiency: share of the peak in the forward pass of the best fused attention kernel.
        torch_attention_efficiency: the same for torch's own kernels.
        cudnn_attention_efficiency: the same for cuDNN's, with heads of 64 and of 128; None where it was not measured.
        kernel_seconds: time to start and end one kernel on the device.
        dispatch_seconds: time in which the host issues one operation.
        node_size: number of devices that the link `node` connects; the link `network` connects nodes.
        host_bytes_per_second: rate between a device and its host's memory.
        host_memory_bytes: the host's memory for each device that is used.
        host_memory_bytes_per_second: rate of the host's memory for each device.
        crowding: ranks per core, at least 1, on the host's processor; constants were measured with all cores busy.
        crowded: the link between `crowded_ranks` ranks of a host with fewer cores, if it was measured.
    """

    name: str
    memory_bytes: float
    context_bytes: float
    memory_bytes_per_second: float
    flops: Mapping[str, float]
    matmul_efficiency: Mapping[str, float]
    compute_units: int
    attention_efficiency: float
    torch_attention_efficiency: float
    kernel_seconds: float
    dispatch_seconds: float
    node_size: int
    node: Link
    network: Link
    host_bytes_per_second: float
    host_memory_bytes: float
    host_memory_bytes_per_second: float
    crowding: float = 1.0
    crowded: Link | None = None
    crowded_ranks: int = 0
    cudnn_attention_efficiency: tuple[float, float] | None = None

    @property
    def is_host(self) -> bool:
        """Whether the device is the host's processor: its cores then do all traffic, in the host's memory."""
        return self.compute_units == 1

    @property
    def limit_bytes(self) -> float:
        """Bytes that a rank can allocate."""
        return self.memory_bytes - self.context_bytes

    @property
    def planned_bytes(self) -> float:
        """Bytes that a recommended layout may need."""
        return (1 - HEADROOM) * self.limit_bytes

    @property
    def in_tf32(self) -> Hardware:
        """Return the device with float32 products in TF32, as with `torch.backends.cuda.matmul.allow_tf32`."""
        if "tf32" not in self.flops:
            return self
        of_tf32 = {"fp32": self.flops["tf32"]}, {"fp32": self.matmul_efficiency["tf32"]}
        flops = {**self.flops, **of_tf32[0]}
        efficiency = {**self.matmul_efficiency, **of_tf32[1]}
        return replace(self, flops=flops, matmul_efficiency=efficiency)

    def own_attention_efficiency(self, head: float) -> float:
        """Return the share of the peak of attention with heads of this width, by the kernel that the harness prefers.

        That is cuDNN's where it was measured; between heads of 64 and 128 it is interpolated.
        """
        if self.cudnn_attention_efficiency is None:
            return self.torch_attention_efficiency
        narrow, wide = self.cudnn_attention_efficiency
        return narrow + (wide - narrow) * min(max(head / 64 - 1, 0.0), 1.0)

    def reached_flops(self, precision: str) -> float:
        """Return the FLOP/s of the largest matrix products."""
        return self.flops[precision] * self.matmul_efficiency[precision]


def names() -> list[str]:
    """Return the names of the packaged devices."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_hardware(name: str, world_size: int | None = None) -> Hardware:
    """Return a packaged device, or that of a file, as one of `world_size` ranks sees it; None: all hosts are full.

    Raises UserError if there is no such device, or the file is not valid.
    """
    content, path = read_device(name)
    return device_of(content, path, world_size)


def read_device(name: str) -> tuple[JsonObject, str]:
    """Return the content of a device file and its path. Raises UserError if there is none."""
    packaged = FOLDER / f"{name.lower()}.json"
    is_packaged = name.lower() in names()
    path = packaged if is_packaged else Path(name)
    try:
        content = read_json(path)
    except (OSError, ValueError):
        known = ", ".join(names())
        raise UserError(f"--hardware {name}: unknown: use one of {known}, or the path of a device file") from None
    return content, str(path)


def device_of(content: object, path: str, world_size: int | None = None) -> Hardware:
    """Return the device that a file's content describes, as one of `world_size` ranks sees it.

    A file gives the host's memory for each of its devices. Ranks that are fewer than a host's devices share all.
    """
    hardware = _read(content, path)
    if isinstance(content, Mapping) and "cores" in content:
        return _shared(hardware, world_size or 1, _number(content, path, "cores"))
    assert isinstance(content, Mapping)
    of_host = _count(content, path, "host", "devices") if "devices" in content["host"] else hardware.node_size
    more = max(1.0, of_host / (world_size or of_host))
    return replace(hardware, host_memory_bytes=hardware.host_memory_bytes * more)


def _shared(hardware: Hardware, ranks: int, cores: float) -> Hardware:
    """Return one rank's share of a host's processor: of its memory, and of a core if ranks outnumber cores."""
    speed = min(1.0, cores / ranks)
    return replace(
        hardware,
        memory_bytes=hardware.memory_bytes / ranks,
        host_memory_bytes=hardware.host_memory_bytes / ranks,
        flops={key: value * speed for key, value in hardware.flops.items()},
        memory_bytes_per_second=hardware.memory_bytes_per_second * speed,
        dispatch_seconds=hardware.dispatch_seconds / speed,
        host_memory_bytes_per_second=hardware.host_memory_bytes_per_second * speed,
        node=_crowded_link(hardware, ranks, speed),
        crowding=1 / speed,
    )


def _crowded_link(hardware: Hardware, ranks: int, speed: float) -> Link:
    """Return the link of one of `ranks`; if they outnumber the cores, it is scaled from the `crowded` measurement."""
    node, crowded = hardware.node, hardware.crowded
    if crowded is None or speed == 1.0:
        return Link(bytes_per_second=node.bytes_per_second * speed, hop_seconds=node.hop_seconds / speed)
    more = ranks / hardware.crowded_ranks
    return Link(
        bytes_per_second=min(node.bytes_per_second, crowded.bytes_per_second / more),
        hop_seconds=max(node.hop_seconds, crowded.hop_seconds * more),
    )


def _number(content: object, path: str, *keys: str) -> float:
    """Return a number of a device file, written alone or with its source. Raises UserError unless it is above 0."""
    found: object = content
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    found = found.get("value") if isinstance(found, Mapping) else found
    if not isinstance(found, (int, float)) or isinstance(found, bool) or not 0 < found < float("inf"):
        raise UserError(f"{path}: {'.'.join(keys)} is {json.dumps(found)}: write a number above 0")
    return float(found)


def _count(content: object, path: str, *keys: str) -> int:
    """Return a whole number of a device file. Raises UserError unless it is at least 1."""
    number = _number(content, path, *keys)
    if number < 1 or number % 1:
        raise UserError(f"{path}: {'.'.join(keys)} is {number}: write a whole number from 1")
    return int(number)


def _read(content: object, path: str) -> Hardware:
    """Return the device that a file describes."""
    value = partial(_number, content, path)

    def link(key: str) -> Link:
        peak = value(key, "gb_per_second") * 1e9
        part = content.get(key) if isinstance(content, Mapping) else None
        has_exchange = isinstance(part, Mapping) and "exchange_efficiency" in part
        return Link(
            bytes_per_second=peak * value(key, "efficiency"),
            hop_seconds=value(key, "hop_seconds"),
            exchange_bytes_per_second=peak * value(key, "exchange_efficiency") if has_exchange else 0.0,
        )

    precisions = content.get("tflops") if isinstance(content, Mapping) else None
    if not isinstance(precisions, Mapping) or any(key not in precisions for key in ("fp32", "bf16")):
        raise UserError(f"{path}: no tflops of fp32 and bf16: write them as the packaged files of `--hardware` do")
    assert isinstance(content, Mapping)
    measured = "crowded" in content
    own_attention = "torch_attention_efficiency" in content
    cudnn = "cudnn_attention_efficiency"
    return Hardware(
        name=str(content.get("name", path)),
        memory_bytes=value("memory_gib") * GIB,
        context_bytes=value("context_gib") * GIB,
        memory_bytes_per_second=value("memory_gb_per_second") * value("memory_efficiency") * 1e9,
        flops={key: value("tflops", key) * 1e12 for key in precisions},
        matmul_efficiency={key: value("matmul_efficiency", key) for key in precisions},
        compute_units=_count(content, path, "compute_units"),
        attention_efficiency=value("attention_efficiency"),
        torch_attention_efficiency=value("torch_attention_efficiency" if own_attention else "attention_efficiency"),
        cudnn_attention_efficiency=(value(cudnn, "heads_of_64"), value(cudnn, "heads_of_128"))
        if cudnn in content
        else None,
        kernel_seconds=value("kernel_seconds"),
        dispatch_seconds=value("host", "dispatch_seconds"),
        node_size=_count(content, path, "node", "devices"),
        node=link("node"),
        network=link("network"),
        host_bytes_per_second=value("host", "gb_per_second") * 1e9,
        host_memory_bytes=value("host", "memory_gib") * GIB,
        host_memory_bytes_per_second=value("host", "memory_gb_per_second") * 1e9,
        crowded=link("crowded") if measured else None,
        crowded_ranks=_count(content, path, "crowded", "ranks") if measured else 0,
    )
