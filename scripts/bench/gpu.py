"""One GPU: a llama of 1 billion parameters in bf16 on sequences of 4,096 tokens, by three programs.

    python scripts/bench/gpu.py [--rounds 3] [--steps 6] [--micro_batch 1] [--small]

Prints tokens/s, peak memory and MFU of the harness, of HuggingFace's Trainer with DeepSpeed (ZeRO-1) and of a plain
PyTorch loop under autocast, in rounds, each in a process of its own. MFU counts the operations of the model (no
recomputation) against the datasheet's dense bf16 rate, and against the rate of a large matrix product that is measured
first. Without a GPU it says so and exits 0; --small tries the programs on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peer_programs.task import Task, Work
from report import RESULTS, write_report

from harness.planner.hardware import load_hardware, names
from harness.planner.model_config import read_decoder

PROGRAMS = {
    "PyTorch": ("plain_torch", "one_process"),
    "HF Trainer with DeepSpeed": ("trainers", "hf_zero1"),
    "harness": ("trainers", "harness_zero1_alone"),
}
WORK = Work(
    shape={
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    micro_batches=8,
    samples=1,
    length=4096,
    dtype="bfloat16",
)
SMALL = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
EDGE = 8192  # of the measured matrix product


def product_rate(edge: int, seconds: float = 2.0) -> float:
    """Return the operations a second of a square matrix product in bf16 on the accelerator."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    done, begun, elapsed = 0, 0.0, 0.0
    while elapsed < seconds:
        if done == 1:  # the first one warms up
            begun = time.perf_counter()
        a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize()
        done += 1
        elapsed = time.perf_counter() - begun if done > 1 else 0.0
    return 2 * edge**3 * (done - 1) / elapsed


def run_program(name: str, folder: Path, steps: int) -> None:
    """Train with one program; write losses, seconds and peak memory."""
    module, function = PROGRAMS[name]
    task = Task(folder, steps)
    getattr(import_module(f"peer_programs.{module}"), function)(task)
    peak = torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else 0
    found = {"losses": task.losses, "seconds": task.seconds, "peak_gib": peak / 2**30}
    (folder / "found.json").write_text(json.dumps(found))


def datasheet_rate(device: str) -> float | None:
    """Return the dense bf16 operations a second of a device by its name; None for one that is not known."""
    known = [name for name in names() if name.split("-")[0].lower() in device.lower()]
    return load_hardware(known[0], 1).flops["bf16"] if known and device != "cpu" else None


def measured(args: argparse.Namespace, work: Work, folder: Path) -> dict[str, Any]:
    """Make the rounds; return the figures of each program."""
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        rounds.append({})
        for name in PROGRAMS:
            own = [sys.executable, __file__, "--program", name, "--folder", str(folder), "--steps", str(args.steps)]
            subprocess.run(own, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"})
            rounds[-1][name] = json.loads((folder / "found.json").read_text())
    flops = read_decoder(str(folder)).flops_per_token(work.length)
    rows = {}
    for name in PROGRAMS:
        rate = median(work.tokens / second for one in rounds for second in one[name]["seconds"][2:])
        rows[name] = {
            "tokens_per_second": [work.tokens / median(one[name]["seconds"][2:]) for one in rounds],
            "median_tokens_per_second": rate,
            "peak_gib": max(one[name]["peak_gib"] for one in rounds),
            "tflops": rate * flops / 1e12,
            "losses": rounds[0][name]["losses"],
        }
    return rows


def main() -> None:
    """Measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of each program and round; the first two are left out")
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the programs")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program is not None:
        run_program(args.program, args.folder, args.steps)
        return
    if not torch.cuda.is_available() and not args.small:
        print("no GPU here: nothing was measured (--small tries the programs without one)")
        return
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    work = replace(WORK, samples=args.micro_batch)
    if args.small:
        work = replace(work, shape={**WORK.shape, **SMALL}, length=64)
    product = product_rate(256 if args.small else EDGE)
    with tempfile.TemporaryDirectory() as name:
        work.write(Path(name))
        rows = measured(args, work, Path(name))
    sheet = datasheet_rate(device)
    for row in rows.values():
        row["mfu_of_datasheet"] = None if sheet is None else row["tflops"] * 1e12 / sheet
        row["mfu_of_measured_product"] = row["tflops"] * 1e12 / product
    content = {"device": device, "work": asdict(work), "product_tflops": product / 1e12, "programs": rows}
    write_report(args.output, content, what=str(__doc__))
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
