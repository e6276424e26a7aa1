"""One step of a program under torch's profiler: what the device computed, and where it was idle and why."""

from __future__ import annotations

import cProfile
import json
import pstats
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerState

LONG_GAP_US = 20.0
KINDS = (  # the first whose words a kernel's name has
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    (
        "products",
        ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitKreduce", "aten::linear", "aten::mm", "addmm", "bmm"),
    ),
    ("optimizer", ("multi_tensor_apply", "FusedAdam", "adam")),
    ("reductions", ("reduce", "norm", "Norm")),
    ("copies", ("copy", "Memcpy", "Memset", "fill", "cat")),
    ("elementwise", ("elementwise", "vectorized", "triton", "unrolled")),
)


class Looking:
    """Torch's profiler between `start` and `stop`."""

    def start(self) -> None:
        """Begin."""
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._profile.__enter__()

    def stop(self) -> dict[str, Any]:
        """Wait for the device, end, and return the account of what was seen."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._profile.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(trace))
            return account(json.loads(trace.read_text())["traceEvents"])


def of_step(step: Callable[[], object]) -> dict[str, Any]:
    """Return the account of a step."""
    looking = Looking()
    looking.start()
    step()
    return looking.stop()


class OfStep(TrainerCallback):
    """Looks on at a step of HuggingFace's Trainer; `found` is its account."""

    def __init__(self, number: int) -> None:
        self._number, self._looking = number, Looking()
        self.found: dict[str, Any] = {}

    def on_step_begin(self, _args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Begin with the step."""
        if state.global_step == self._number:
            self._looking.start()

    def on_step_end(self, _args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """End with the step."""
        if state.global_step == self._number + 1:
            self.found = self._looking.stop()


def account(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return milliseconds by kernel and kind, and the gaps between kernels with what the host did last before each.

    Without a device, kernels are the operations of the CPU that no other one calls.
    """
    kernels, launches, operations = [], {}, []
    for event in events:
        if event.get("ph") != "X":
            continue
        match event.get("cat"):
            case "kernel" | "gpu_memcpy" | "gpu_memset":
                kernels.append(event)
            case "cuda_runtime" | "cuda_driver":
                launches[event.get("args", {}).get("correlation")] = event
            case "cpu_op" | "user_annotation":
                operations.append(event)
    operations.sort(key=lambda event: (event["ts"], -event["dur"]))
    if not kernels and not torch.accelerator.is_available():
        kernels = _outermost(operations)
    if not kernels:
        return {"failed": "the profiler has seen no kernel"}
    kernels.sort(key=lambda event: event["ts"])
    starts = [event["ts"] for event in operations]
    begin, busy, free, gaps = kernels[0]["ts"], 0.0, kernels[0]["ts"], []
    for kernel in kernels:
        if kernel["ts"] - free > LONG_GAP_US:
            launch = launches.get(kernel.get("args", {}).get("correlation"))
            gaps.append((kernel["ts"] - free, free - begin, _around(launch, operations, starts), kernel["name"][:60]))
        busy += max(0.0, kernel["ts"] + kernel["dur"] - max(free, kernel["ts"]))
        free = max(free, kernel["ts"] + kernel["dur"])
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    by_kind: Counter[str] = Counter()
    for kernel in kernels:
        by_name[kernel["name"][:90]].append(kernel["dur"])
        by_kind[_kind(kernel["name"])] += kernel["dur"]
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]
    by_place = Counter()
    for gap in gaps:
        by_place[gap[2]] += gap[0]
    return {
        "milliseconds": (free - begin) / 1e3,
        "busy": busy / 1e3,
        "kernels": len(kernels),
        "by_kind": {kind: us / 1e3 for kind, us in by_kind.most_common()},
        "by_name": {name: {"ms": sum(us) / 1e3, "kernels": len(us)} for name, us in most},
        "gaps": {
            "ms": sum(gap[0] for gap in gaps) / 1e3,
            "number": len(gaps),
            "by_place": {place: us / 1e3 for place, us in by_place.most_common(12)},
            "longest": [
                {"ms": us / 1e3, "after_ms": at / 1e3, "host": host, "kernel": name}
                for us, at, host, name in sorted(gaps, reverse=True)[:12]
            ],
            "tenths": _tenths(gaps, free - begin),
        },
    }


def _outermost(operations: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the operations of torch, sorted by their begin, which no other one calls."""
    found: list[dict[str, Any]] = []
    ends: dict[int, float] = {}
    for event in operations:
        if event["name"].startswith("aten::") and event["ts"] >= ends.get(event["tid"], 0.0):
            found.append(event)
            ends[event["tid"]] = event["ts"] + event["dur"]
    return found


def _tenths(gaps: Iterable[tuple[float, float, str, str]], whole: float) -> list[float]:
    """Return idle milliseconds in each tenth of the step."""
    found = [0.0] * 10
    for length, at, _, _ in gaps:
        found[min(9, int(10 * at / whole))] += length / 1e3
    return found


def _around(launch: dict[str, Any] | None, operations: list[dict[str, Any]], starts: list[float]) -> str:
    """Return the outermost of the operations that were running when a kernel was launched."""
    if launch is None:
        return "unknown"
    at, found = launch["ts"], "Python"
    index = bisect_right(starts, at)
    for event in reversed(operations[max(0, index - 50) : index]):
        if event["ts"] + event["dur"] >= at and event["tid"] == launch["tid"]:
            found = event["name"]
    return found


def _kind(name: str) -> str:
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "others")


def of_host(step: Callable[[], object], steps: int = 2) -> dict[str, Any]:
    """Return where Python spends the main thread's time: milliseconds a step of the functions that take most."""
    looking = cProfile.Profile()
    looking.enable()
    for _ in range(steps):
        step()
    looking.disable()
    found: dict[Any, Any] = pstats.Stats(looking).stats  # type: ignore[attr-defined]
    most = sorted(found.items(), key=lambda item: -item[1][2])[:40]
    return {
        f"{Path(file).parent.name}/{Path(file).name}:{line} {name}"[-90:]: {
            "own_ms": round(1e3 * own / steps, 3),
            "whole_ms": round(1e3 * whole / steps, 3),
            "calls": calls // steps,
        }
        for (file, line, name), (_, calls, own, whole, _) in most
    }
