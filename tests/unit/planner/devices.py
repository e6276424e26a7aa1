"""A device with round figures, on which formulas can be worked by hand."""

from __future__ import annotations

from dataclasses import replace

from harness.planner.hardware import GIB, Hardware, Link, load_hardware

NODE, NETWORK = Link(bytes_per_second=100.0, hop_seconds=1.0), Link(bytes_per_second=10.0, hop_seconds=100.0)


def device(**changes: object) -> Hardware:
    """Return a device of one processor that reaches 1,000 operations a second and moves memory in no time."""
    round_figures = replace(
        load_hardware("h100"),
        memory_bytes=100.0 * GIB,
        context_bytes=0.0,
        memory_bytes_per_second=1e30,
        flops=dict.fromkeys(("fp32", "bf16", "fp16", "fp8"), 1000.0),
        matmul_efficiency=dict.fromkeys(("fp32", "bf16", "fp16", "fp8"), 1.0),
        compute_units=1,
        attention_efficiency=0.5,
        kernel_seconds=0.0,
        dispatch_seconds=0.0,
        node_size=8,
        node=NODE,
        network=NETWORK,
    )
    return replace(round_figures, **changes)  # type: ignore[arg-type]
