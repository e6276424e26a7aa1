"""One GPU, at most ten minutes, no arguments: does the harness compute right there, how fast, with how much memory.

    python scripts/bench/gpu.py

Writes a JSON (scripts/bench/results/gpu.json, or --output) and prints a summary; please send it with an issue. In it:

    versions     of Python, torch, CUDA, NCCL, the driver, and what is installed beside
    correctness  losses of a tiny model in each layout that one GPU can hold, beside those of plain PyTorch on the CPU
    speed        tokens/s, MFU, peak memory and waits of a llama of 1 billion parameters (bf16, sequences of 4,096) with
                 the harness, without its fused kernels, with torch.compile and with Liger's, with HuggingFace's Trainer
                 (also with Liger and torch.compile) and with plain PyTorch
    largest      the same of the harness for the largest llama that the planner expects to fit
    predicted    what the planner had expected of each run of the harness

Each part runs in a process of its own; what fails is noted with its error, and the rest goes on. MFU counts the
operations of the model (no recomputation) against the datasheet's dense bf16 rate, and against the rate of a large
matrix product that is measured first. --small tries all of it on any machine, in a minute.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from peer_programs.task import Task, Work
from report import RESULTS, write_report

from harness.planner.hardware import load_hardware, names
from harness.planner.model_config import read_decoder

if TYPE_CHECKING:  # parts that train without the harness do not wait for its imports
    from harness import Trainer

LIMIT_S = 600.0
EDGE = 8192  # of the measured matrix product
FP32, BF16 = 2e-5, 0.02  # relative difference of a loss from the CPU's: sums in another order, bf16
DTYPES = {"bf16": "bfloat16"}  # of layouts; float32 of all others
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
    micro_batches=4,
    samples=1,
    length=4096,
    dtype="bfloat16",
)
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LARGER = (  # width, feed-forward, layers, heads: 14, 8, 3 billion parameters
    (5120, 13824, 40, 40),
    (4096, 14336, 32, 32),
    (3072, 8192, 28, 24),
)
TINY = {**WORK.shape, **SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"zero_optimization": {"stage": 0}},
    "ZeRO-1": {"zero_optimization": {"stage": 1}},
    "ZeRO-2": {"zero_optimization": {"stage": 2}},
    "ZeRO-3": {"zero_optimization": {"stage": 3}},
    "recomputation": {"pipeline": {"stages": 1, "activation_checkpoint_interval": 1}},
    "optimizer on the host": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "compiled": {"compile": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}},
}
PROGRAMS: dict[str, dict[str, Any]] = {
    "harness": {},
    "harness, not fused": {"fused_kernels": False},
    "harness, compiled": {"compile": {"enabled": True}},
    "harness, Liger": {"use_liger_kernel": True},
}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
"""DeepSpeed alone, without a launcher, would ask mpi4py."""
OTHERS = {
    "PyTorch": ("plain_torch", "one_process"),
    "HF Trainer with DeepSpeed": ("trainers", "hf_zero1"),
    "HF Trainer with DeepSpeed, Liger, compiled": ("trainers", "hf_zero1_fused"),
}


def trained(task: Task, **options: Any) -> Trainer:
    """Return a trainer of the harness for a task; `options` are sections of the config, and flags."""
    trainers = import_module("peer_programs.trainers")
    sections = {name: value for name, value in options.items() if isinstance(value, dict)}
    flags = {name: value for name, value in options.items() if name not in sections}
    return trainers.trainer_of(task, {"zero_optimization": {"stage": 1}, **sections}, **flags)


def with_harness(task: Task, **options: Any) -> dict[str, Any]:
    """Train with the harness; return what it had expected, and how often a step waits for the device."""
    trainer = trained(task, **options)
    task.run(lambda: trainer.training_step().loss)
    waits = waits_of(lambda: trainer.training_step())
    expected = trainer.run.prediction
    found = {"waits_in_a_step": waits, "expected": None if expected is None else expected.as_json()}
    trainer.close()
    return found


def waits_of(step: Callable[[], object]) -> dict[str, int] | None:
    """Return how often a step waits for the device, by place; None where that is not known."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step()
        torch.cuda.set_sync_debug_mode("default")
        places = [each for each in said if "synchronizing CUDA operation" in str(each.message)]
        return Counter(f"{in_package(each.filename)}:{each.lineno}" for each in places)
    step()
    return None


def in_package(path: str) -> str:
    """Return a path from the folder of its package on."""
    packages = (f"/{name}/" for name in ("harness", "deepspeed", "transformers", "torch"))
    return next((path[path.rindex(each) + 1 :] for each in packages if each in path), path)


class OnHost(Task):
    """A task for the CPU of a machine with a GPU."""

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")


def losses_of_pytorch(folder: Path) -> dict[str, list[float]]:
    """Return the losses of three steps of plain PyTorch on the CPU, by the dtype that is computed in."""
    one_process, found = import_module("peer_programs.plain_torch").one_process, {}
    for dtype in ("float32", "bfloat16"):
        task = OnHost(folder, 3)
        task.work = replace(task.work, dtype=dtype)
        one_process(task)
        found[dtype] = task.losses
    return found


def losses_of_layouts(folder: Path, *, small: bool) -> dict[str, Any]:
    """Return the losses of three steps in each layout, or the error; `small`: without a compiler."""
    found: dict[str, Any] = {}
    gc.freeze()  # each Trainer collects garbage at its end: not among what was imported
    for name, sections in LAYOUTS.items():
        if small and "compile" in sections:
            continue
        task = Task(folder, 3)
        try:
            trainer = trained(task, **sections)
            task.run(lambda trainer=trainer: trainer.training_step().loss)
            trainer.close()
            found[name] = task.losses
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def run_program(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Train with one program; return losses, seconds, peak memory and what the program says besides."""
    task = Task(folder, steps)
    more: dict[str, Any] = {}
    if name in OTHERS:
        module, function = OTHERS[name]
        getattr(import_module(f"peer_programs.{module}"), function)(task)
    else:
        more = with_harness(task, **PROGRAMS[name])
    peak = torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else 0
    reserved = torch.accelerator.max_memory_reserved() if torch.accelerator.is_available() else 0
    memory = {"peak_gib": peak / 2**30, "reserved_gib": reserved / 2**30}
    return {"losses": task.losses, "seconds": task.seconds, **memory, **more}


def product_rate(edge: int, seconds: float) -> float:
    """Return the operations a second of a square matrix product in bf16 on the accelerator."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
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


def versions() -> dict[str, Any]:
    """Return what this machine is and has."""
    packages = ("torch", "deepspeed", "transformers", "liger-kernel", "triton", "flash-attn", "nvidia-nccl-cu12")
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found["device"] = {"name": device.name, "memory_gib": device.total_memory / 2**30}
        found["device"]["capability"] = f"{device.major}.{device.minor}"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            found["driver"] = None
    found["environment"] = {name: value for name, value in os.environ.items() if name.startswith(("PYTORCH_", "NCCL_"))}
    return found


def datasheet_rate(device: str) -> float | None:
    """Return the dense bf16 operations a second of a device by its name; None for one that is not known."""
    words = set(device.lower().replace("-", " ").split())
    known = [name for name in names() if set(name.split("-")) <= words]
    return load_hardware(known[-1], 1).flops["bf16"] if known else None


class Clock:
    """Keeps all parts together under ten minutes."""

    def __init__(self, limit_s: float) -> None:
        self.until = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that remain."""
        return self.until - time.monotonic()

    def run(self, part: list[str], environment: dict[str, str] | None = None) -> Any:
        """Run a part of this script in a process; return what it has found, or its error as text."""
        if self.left_s < 20:
            return "left out: the time is up"
        with tempfile.TemporaryDirectory() as name:
            command = [sys.executable, __file__, *part, "--found", f"{name}/found.json"]
            try:
                done = subprocess.run(
                    command,
                    env={**os.environ, **ALONE, **(environment or {})},
                    stderr=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    text=True,
                    timeout=self.left_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return "ended: the time was up"
            if done.returncode:
                last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
                return f"failed: {last[0] if last else f'exit code {done.returncode}'}"
            return json.loads(Path(name, "found.json").read_text())


def part(args: argparse.Namespace) -> Any:
    """Do what a process of one part is for."""
    if args.part == "layouts":
        return losses_of_layouts(args.folder, small=args.small)
    return run_program(args.part, args.folder, args.steps)


def compared(on_device: Any, on_cpu: dict[str, list[float]]) -> dict[str, Any]:
    """Return the losses of each layout beside those on the CPU of the same dtype, and whether they agree."""
    if isinstance(on_device, str):
        return {"device": on_device, "cpu": on_cpu, "agree": False}
    rows = {}
    for name, losses in on_device.items():
        wanted, bound = on_cpu[DTYPES.get(name, "float32")], BF16 if name in DTYPES else FP32
        fine = not isinstance(losses, str)
        off = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)) if fine else None
        rows[name] = {"device": losses, "cpu": wanted, "off": off, "agree": off is not None and off < bound}
    return rows


def rates(found: Any, work: Work, flops: float, product: float, sheet: float | None) -> Any:
    """Add tokens/s and MFU to what a program has measured; the first three steps warm up."""
    if isinstance(found, str):
        return {"failed": found}
    second = median(found["seconds"][3:])
    speed = work.tokens / second
    reached = {"tokens_per_second": speed, "step_seconds": second, "tflops": speed * flops / 1e12}
    reached["mfu_of_measured_product"] = speed * flops / product
    reached["mfu_of_datasheet"] = None if sheet is None else speed * flops / sheet
    return {**reached, **found}


def largest_that_fits(memory_gib: float) -> Work | None:
    """Return the largest of some models that trains in bf16 on one device: 16 bytes a parameter, and 15% besides."""
    for hidden, wide, layers, heads in LARGER:
        shape = {**WORK.shape, "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers}
        work = replace(WORK, shape={**shape, "num_attention_heads": heads, "num_key_value_heads": 8}, micro_batches=2)
        each = hidden * (2 * hidden + 2 * hidden * 8 // heads + 3 * wide)
        parameters = layers * each + 2 * hidden * shape["vocab_size"]
        if 16 * parameters * 1.15 < memory_gib * 2**30:
            return work
    return None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all parts; return the report."""
    clock = Clock(args.limit)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if accelerator is None else accelerator.type
    name = "cpu" if accelerator is None else str(torch.get_device_module(kind).get_device_name(0))
    work = replace(WORK, shape=TINY, length=64) if args.small else WORK
    tiny = replace(WORK, shape=TINY, length=64, dtype="float32")
    report: dict[str, Any] = {"device": name, "machine": versions(), "work": asdict(work)}
    with tempfile.TemporaryDirectory() as folder:
        for each, what in (("tiny", tiny), ("model", work)):
            Path(folder, each).mkdir()
            what.write(Path(folder, each), weights=each == "tiny")
        run = partial(clock.run, environment={"CUDA_VISIBLE_DEVICES": "0"} if kind == "cuda" else {})
        layouts = ["--part", "layouts", "--folder", f"{folder}/tiny", *(["--small"] if args.small else [])]
        report["correctness"] = compared(run(layouts), losses_of_pytorch(Path(folder, "tiny")))
        product, sheet = product_rate(*((256, 0.1) if args.small else (EDGE, 2.0))), datasheet_rate(name)
        report["product_tflops"] = product / 1e12
        flops = read_decoder(f"{folder}/model").flops_per_token(work.length)
        report["speed"] = {}
        for program in args.programs:
            part = ["--part", program, "--folder", f"{folder}/model", "--steps", str(args.steps)]
            lacks_liger = "Liger" in program and find_spec("liger_kernel") is None
            found = "left out: liger-kernel is not installed" if lacks_liger else run(part)
            report["speed"][program] = rates(found, work, flops, product, sheet)
        large = None if kind == "cpu" else largest_that_fits(torch.accelerator.get_memory_info(0)[1] / 2**30)
        if large is not None and not args.small:
            Path(folder, "large").mkdir()
            large.write(Path(folder, "large"), weights=False)
            flops = read_decoder(f"{folder}/large").flops_per_token(large.length)
            found = run(["--part", "harness", "--folder", f"{folder}/large", "--steps", str(args.steps)])
            report["largest"] = {"work": asdict(large), **rates(found, large, flops, product, sheet)}
    report["seconds"] = args.limit - clock.left_s
    return report


def summary(report: dict[str, Any]) -> str:
    """Return the report in some lines."""
    lines = [f"{report['device']}: {report['seconds']:.0f} s"]
    for name, row in report["correctness"].items():
        if isinstance(row, dict):
            lines.append(f"  {name}: {'as on the CPU' if row['agree'] else 'NOT as on the CPU: ' + str(row['device'])}")
    rows = {**report["speed"], "largest": report.get("largest", {})}
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"  {name}: {row['failed']}")
        elif row:
            mfu = row["mfu_of_datasheet"] or row["mfu_of_measured_product"]
            speed, memory = row["tokens_per_second"], row["peak_gib"]
            lines.append(f"  {name}: {speed:,.0f} tokens/s, MFU {mfu:.0%}, {memory:.1f} GiB")
    return "\n".join(lines)


def main() -> None:
    """Measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of it (default: 600)")
    parser.add_argument("--steps", type=int, default=8, help="of each program; the first three are left out")
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS, *OTHERS], help="default: all")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    for hidden in ("--part", "--folder", "--found"):
        parser.add_argument(hidden, type=Path if hidden != "--part" else str, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        args.found.write_text(json.dumps(part(args)))
        return
    if not torch.accelerator.is_available() and not args.small:
        print("no GPU here: nothing was measured (--small tries the script without one)")
        return
    report = measure(args)
    write_report(args.output, report, what=str(__doc__))
    print(f"{summary(report)}\nwrote {args.output}: please send it")


if __name__ == "__main__":
    main()
