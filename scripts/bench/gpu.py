"""One GPU, three runs of at most nine minutes: where a step's time goes, how fast it is beside others, what fits.

    python scripts/bench/gpu.py [--run where|peers|sizes]

Writes a JSON (gpu-DEVICE.json in scripts/bench/results, or --output) after each part, and prints a table; please send
it with an issue. Started again with the same file, it goes on with the parts that are missing or have failed. The runs:

    where   operations of a layer by themselves, in several programs; then a profiled step of the harness and of
            HuggingFace's Trainer: kernels, and where the device was idle; and how often varying lengths compile anew
    peers   (default) losses of a tiny model in each layout that one GPU can hold, beside those of plain PyTorch on the
            CPU; then tokens/s, MFU, peak memory and waits of a llama of 1 billion parameters (bf16, sequences of 4,096)
            with the harness in several ways, with HuggingFace's Trainer and with plain PyTorch, in two rounds
    sizes   the harness alone: LoRA, whole models of 3 and 8 billion parameters, a mixture of experts, long sequences,
            with the memory that the planner had expected

Each part runs in a process of its own; what fails is noted with its error, and the rest goes on. MFU counts the
operations of the model (no recomputation) against the datasheet's dense bf16 rate, and against the rate of a large
matrix product that is measured first; of causal attention it counts the half that is needed, `mfu_whole_attention` all
of it, as nanoGPT and torchtitan do, against the datasheet's rate, or the measured one where there is no datasheet.
--small tries all of it on any machine, in a few minutes; without a GPU the profiled step is that of the CPU's own
operations.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
import torch
from peer_programs.task import Task, Work
from report import RESULTS, write_report

from harness.arguments.themes.lora import LoraArguments
from harness.planner.hardware import load_hardware, names
from harness.planner.model_config import read_decoder
from harness.resilience.on_host.processes import signal_when_parent_dies

if TYPE_CHECKING:  # parts that train without the harness do not wait for its imports
    from harness import Trainer

LIMIT_S = 540.0
ENDING_S = 14.0  # to end a part that takes too long, to write the report, and to leave Python
WARMING = 3  # first steps of a program, which its speed leaves out
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
    "harness, compiled, CUDA graphs": {"compile": {"enabled": True, "mode": "reduce-overhead"}},
    "harness, Liger": {"use_liger_kernel": True},
    "harness, Liger, compiled": {"use_liger_kernel": True, "compile": {"enabled": True}},
}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
"""DeepSpeed alone, without a launcher, would ask mpi4py."""
OTHERS = {
    "PyTorch": ("plain_torch", "one_process"),
    "PyTorch, compiled, weights in bf16": ("plain_torch", "compiled_with_masters"),
    "HF Trainer with DeepSpeed": ("trainers", "hf_zero1"),
    "HF Trainer with DeepSpeed, Liger, compiled": ("trainers", "hf_zero1_fused"),
}
TRACED = (
    "harness",
    "harness, compiled, CUDA graphs",
    "harness, compiled",
    "harness, Liger",
    "HF Trainer with DeepSpeed",
)
EIGHT = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
THREE = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}


@dataclass(frozen=True)
class Size:
    """A training that people run on one device.

    Attributes:
        shape, work: what differs from WORK in the model and in the rest.
        options: those of the harness.
    """

    shape: dict[str, int]
    work: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def of(self, usual: Work, *, small: bool) -> Work:
        """Return the work; `small`: with the sizes of the usual one."""
        if small:
            return replace(usual, **{**self.work, "shape": {**self.shape, **usual.shape}, "length": usual.length})
        return replace(usual, **self.work, shape={**usual.shape, **self.shape})


SIZES = {
    "8B, LoRA": Size(
        EIGHT,
        {"samples": 2, "micro_batches": 4},
        {"use_peft": True, "lora_target_modules": ["all-linear"]},
    ),
    "3B": Size(THREE),
    "8B, optimizer on the host": Size(
        {**EIGHT, "vocab_size": 32768},
        {"micro_batches": 8},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
    ),
    "2.5B, 8 experts": Size(
        {"intermediate_size": 2816, "num_local_experts": 8, "num_experts_per_tok": 2}, {"family": "mixtral"}
    ),
    "1B, 32,768 tokens": Size(
        {"max_position_embeddings": 32768},
        {"length": 32768, "micro_batches": 1},
        {"tiling": {"loss": 4096}, "pipeline": {"stages": 1, "activation_checkpoint_interval": 1}},
    ),
}
VARYING = (4096, 3840, 2816, 4000, 1024, 3333, 2049, 4096)
"""Lengths of samples: each step has another."""


def trained(task: Task, data: list[dict[str, Any]] | None = None, **options: Any) -> Trainer:
    """Return a trainer of the harness for a task or other data; `options` are sections of the config, and flags."""
    trainers = import_module("peer_programs.trainers")
    sections = {name: value for name, value in options.items() if isinstance(value, dict)}
    flags = {name: value for name, value in options.items() if name not in sections}
    of_lora = {each.name: flags.pop(each.name) for each in fields(LoraArguments) if each.name in flags}
    if of_lora:
        flags["peft_config"] = LoraArguments(**of_lora).peft_config()
    return trainers.trainer_of(task, {"zero_optimization": {"stage": 1}, **sections}, data=data, **flags)


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
    """Train with one program; return losses, seconds, memory, clock and power, and what the program says besides."""
    task = Task(folder, steps)
    with Gauge() as gauge:
        if name in OTHERS:
            module, function = OTHERS[name]
            getattr(import_module(f"peer_programs.{module}"), function)(task)
            more: dict[str, Any] = {}
        else:
            more = with_harness(task, **(PROGRAMS[name] if name in PROGRAMS else SIZES[name].options))
    peak = torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else 0
    reserved = torch.accelerator.max_memory_reserved() if torch.accelerator.is_available() else 0
    memory = {"peak_gib": peak / 2**30, "reserved_gib": reserved / 2**30}
    return {"losses": task.losses, "seconds": task.seconds, **memory, **gauge.medians(), **more}


class Gauge:
    """Reads clock and power of the first GPU twice a second, with nvidia-smi; reads nothing where there is none."""

    def __enter__(self) -> Gauge:
        query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        command = ["nvidia-smi", "-i", "0", *query, "-lms", "500"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if which(command[0]) else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()

    def medians(self) -> dict[str, float]:
        """Return the medians of the later half, when the program trained."""
        lines = "" if self._process is None else self._process.communicate()[0]
        rows = [tuple(map(float, line.split(","))) for line in lines.splitlines() if line.count(",") == 1]
        later = rows[len(rows) // 2 :]
        if not later:
            return {}
        return {"clock_mhz": median(row[0] for row in later), "watts": median(row[1] for row in later)}


def traced_step(name: str, folder: Path) -> dict[str, Any]:
    """Return an account of a profiled step of a program, after four that are timed, and of its Python."""
    task = Task(folder, 6)
    looking = import_module("gpu_parts.traced")
    if name in OTHERS:
        step = looking.OfStep(4)
        import_module("peer_programs.trainers").hf_trainer(1, task, callbacks=[step])
        return {"seconds": task.seconds, **step.found}
    trainer = trained(Task(folder, 20), **PROGRAMS[name])
    task.run(lambda: trainer.training_step().loss)
    found = {"seconds": task.seconds, **looking.of_step(trainer.training_step)}
    found["host"] = looking.of_host(trainer.training_step)
    trainer.close()
    return found


def recompiled(folder: Path) -> list[int]:
    """Return how many graphs were compiled by the end of each step, if each has samples of another length."""
    from torch._dynamo.utils import counters

    task = Task(folder, len(VARYING))
    longest, found = task.work.length, []
    rows = [row[: longest * length // max(VARYING)] for length in VARYING for row in task.samples()]
    trainer = trained(task, compile={"enabled": True}, data=[{"input_ids": row.tolist()} for row in rows])
    for _ in VARYING:
        trainer.training_step()
        found.append(counters["stats"]["unique_graphs"])
    trainer.close()
    return found


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
    """Keeps all parts together under a limit, of which some seconds have passed."""

    def __init__(self, limit_s: float, passed_s: float = 0.0) -> None:
        self.until = time.monotonic() - passed_s + limit_s
        self.longest_s = limit_s / 2  # of a part: if it hangs, the others still have time

    @property
    def left_s(self) -> float:
        """Seconds that remain."""
        return self.until - time.monotonic()

    def run(self, part: list[str], environment: dict[str, str] | None = None) -> Any:
        """Run a part of this script in a process; return what it has found, or its error as text."""
        if self.left_s < 20:
            return "left out: the time is up"
        with tempfile.TemporaryDirectory() as name:
            command = [sys.executable, __file__, *part, "--found", f"{name}/found.json", "--parent", str(os.getpid())]
            until = min(self.left_s - ENDING_S, self.longest_s)
            with subprocess.Popen(
                command,
                env={**os.environ, **ALONE, **(environment or {})},
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            ) as process:
                try:
                    _, said = process.communicate(timeout=until)
                except BaseException as error:
                    end(process)
                    if isinstance(error, subprocess.TimeoutExpired):
                        return f"ended after {until:.1f} s: it took too long"
                    raise
            if process.returncode:
                last = [line for line in said.splitlines() if line.strip()][-1:]
                return f"failed: {last[0] if last else f'exit code {process.returncode}'}"
            return json.loads(Path(name, "found.json").read_text())


def end(process: subprocess.Popen[str]) -> None:
    """End a part, which gives back the lock of what it compiles: the next run would wait for it forever."""
    process.terminate()
    try:
        process.wait(ENDING_S / 2)
    except subprocess.TimeoutExpired:
        process.kill()


def part(args: argparse.Namespace) -> Any:
    """Do what a process of one part is for."""
    kind, _, name = args.part.partition(": ")
    match kind:
        case "layouts":
            return losses_of_layouts(args.folder, small=args.small)
        case "operations":
            return import_module("gpu_parts.operations").operations(Task(args.folder, 1).work, small=args.small)
        case "traced":
            return traced_step(name, args.folder)
        case "recompiled":
            return recompiled(args.folder)
    return run_program(name, args.folder, args.steps)


def compared(on_device: dict[str, Any], on_cpu: dict[str, list[float]]) -> dict[str, Any]:
    """Return the losses of each layout beside those on the CPU of the same dtype, and whether they agree."""
    rows = {}
    for name, losses in on_device.items():
        wanted, bound = on_cpu[DTYPES.get(name, "float32")], BF16 if name in DTYPES else FP32
        fine = not isinstance(losses, str)
        off = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)) if fine else None
        rows[name] = {"device": losses, "cpu": wanted, "off": off, "agree": off is not None and off < bound}
    return rows


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Rates that a step is compared with, in operations a second; `sheet` None for a device that is not known."""

    product: float
    sheet: float | None

    def reached(self, found: dict[str, Any], folder: Path, *, frozen: bool = False) -> dict[str, Any]:
        """Add tokens/s and MFU to what a program has measured; weights that are `frozen` get no gradient."""
        work, shape = Task(folder, 0).work, read_decoder(str(folder))
        second = median(found["seconds"][WARMING:])
        speed = work.tokens / second
        flops = shape.flops_per_token(work.length, frozen=frozen)
        other_half = 3 * work.length * sum(layer.query + layer.output for layer in shape.layers)
        row = {"tokens_per_second": speed, "step_seconds": second, "tflops": speed * flops / 1e12}
        row["mfu_of_measured_product"] = speed * flops / self.product
        row["mfu_whole_attention"] = speed * (flops + other_half) / (self.sheet or self.product)
        if self.sheet is not None:
            row["mfu_of_datasheet"] = speed * flops / self.sheet
        return row | found


class Report:
    """What is known so far: a JSON that is written after each part, so that a run that was ended can go on."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        before = json.loads(path.read_text()) if path.exists() else {}
        same = before.get("device") == head["device"] and before.get("work") == head["work"]
        self.path, self.found = path, {**(before if same else {}), **head}

    def add(self, names: Sequence[str], measure: Callable[[], Any]) -> None:
        """Measure and write what stands under `names`, unless it is known and has not failed."""
        *outer, last = names
        place = self.found
        for name in outer:
            place = place.setdefault(name, {})
        known = place.get(last)
        if known is None or (isinstance(known, dict) and "failed" in known):
            found = measure()
            place[last] = {"failed": found} if isinstance(found, str) else found
            write_report(self.path, self.found, what=str(__doc__))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make a run; return the report."""
    clock = Clock(args.limit, time.time() - psutil.Process().create_time())  # imports have taken seconds
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if accelerator is None else accelerator.type
    name = "cpu" if accelerator is None else str(torch.get_device_module(kind).get_device_name(0))
    work = replace(WORK, shape=TINY, length=64) if args.small else WORK
    if args.output is None:
        args.output = RESULTS / f"gpu-{name.lower().replace(' ', '-')}{'-small' if args.small else ''}.json"
    report = Report(args.output, {"device": name, "machine": versions(), "work": asdict(work)})
    with tempfile.TemporaryDirectory() as folder:
        run = Parts(args, clock, Path(folder), work, {"CUDA_VISIBLE_DEVICES": "0"} if kind == "cuda" else {})
        {"where": where, "peers": peers, "sizes": sizes}[args.run](run, report)
    report.found["seconds"] = args.limit - clock.left_s
    write_report(report.path, report.found, what=str(__doc__))
    return report.found


@dataclass(frozen=True)
class Parts:
    """Starts the parts of a run, each in a process, on models in folders of their own."""

    args: argparse.Namespace
    clock: Clock
    folder: Path
    work: Work
    environment: dict[str, str]

    def model(self, name: str, work: Work, *, weights: bool = False) -> Path:
        """Return the folder of a model, written when it is first asked for."""
        path = self.folder / name
        if not path.exists():
            path.mkdir()
            work.write(path, weights=weights)
        return path

    def __call__(self, part: str, folder: Path) -> Any:
        """Return what a part has found, or its error as text."""
        if "Liger" in part and find_spec("liger_kernel") is None:
            return "left out: liger-kernel is not installed"
        words = ["--part", part, "--folder", str(folder), "--steps", str(self.args.steps)]
        return self.clock.run([*words, *(["--small"] if self.args.small else [])], self.environment)

    def ceilings(self, report: Report) -> Ceilings:
        """Return the rates to compare with, of which one is measured."""
        report.add(["product_tflops"], lambda: product_rate(*((256, 0.1) if self.args.small else (EDGE, 2.0))) / 1e12)
        return Ceilings(product=1e12 * report.found["product_tflops"], sheet=datasheet_rate(report.found["device"]))


def where(run: Parts, report: Report) -> None:
    """Find out where the time of a step goes."""
    model = run.model("model", run.work)
    report.add(["operations"], lambda: run("operations", model))
    for program in [each for each in TRACED if each in run.args.programs]:
        report.add(["traced", program], lambda program=program: run(f"traced: {program}", model))
    report.add(["graphs_by_step"], lambda: run("recompiled", model))


def peers(run: Parts, report: Report) -> None:
    """Compare numbers with a CPU's, and speed with other programs', in turns, as a device slows when it warms."""
    tiny = run.model("tiny", replace(WORK, shape=TINY, length=64, dtype="float32"), weights=True)

    def correctness() -> Any:
        found = run("layouts", tiny)
        return found if isinstance(found, str) else compared(found, losses_of_pytorch(tiny))

    report.add(["correctness"], correctness)
    ceilings, model = run.ceilings(report), run.model("model", run.work)
    programs = [each for each in run.args.programs if each not in SIZES]
    for round_number in range(1, run.args.rounds + 1):
        for program in programs:
            place = ["rounds", str(round_number), program]
            report.add(place, lambda program=program: run(f"program: {program}", model))
    report.found["speed"] = {}
    for program in programs:
        rounds = [each[program] for each in report.found["rounds"].values() if program in each]
        fine = [each for each in rounds if "failed" not in each]
        report.found["speed"][program] = best(ceilings.reached(each, model) for each in fine) if fine else rounds[0]


def best(rounds: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest of the rounds of a program, with the speeds of all."""
    found = list(rounds)
    fastest = max(found, key=lambda row: row["tokens_per_second"])
    return {**fastest, "tokens_per_second_of_rounds": [row["tokens_per_second"] for row in found]}


def sizes(run: Parts, report: Report) -> None:
    """Train what people train on one device."""
    ceilings = run.ceilings(report)
    for name, size in ((name, size) for name, size in SIZES.items() if name in run.args.programs):
        model, frozen = run.model(name, size.of(run.work, small=run.args.small)), "use_peft" in size.options

        def measured(name: str = name, model: Path = model, frozen: bool = frozen) -> Any:
            found = run(f"program: {name}", model)
            return found if isinstance(found, str) else ceilings.reached(found, model, frozen=frozen)

        report.add(["sizes", name], measured)


def summary(report: dict[str, Any]) -> str:
    """Return the report as text: a line for each part, and a table for each kind of figure."""
    lines = [f"{report['device']}: {report['seconds']:.0f} s"]
    layouts = report.get("correctness", {})
    for name, row in layouts.items() if "failed" not in layouts else ():
        lines.append(f"  {name}: {'as on the CPU' if row['agree'] else 'NOT as on the CPU: ' + str(row['device'])}")
    graphs = report.get("graphs_by_step")
    if isinstance(graphs, list):
        lines.append(f"  graphs compiled by each step, with other lengths: {graphs}")
    measured = {**report.get("speed", {}), **report.get("sizes", {})}
    found = {"layouts": layouts, "other lengths": graphs, **report.get("traced", {}), **measured}
    lines += [f"  {name}: {row['failed']}" for name, row in found.items() if isinstance(row, dict) and "failed" in row]
    return "\n".join([*lines, *_table(SPEED, measured), *_table(TRACE, report.get("traced", {}))])


def _mfu(row: dict[str, Any]) -> str:
    return f"{row.get('mfu_of_datasheet', row['mfu_of_measured_product']):.1%}"


def _expected(row: dict[str, Any]) -> str:
    return "" if row.get("expected") is None else f"{row['expected']['memory_gib']['max']:.1f}"


SPEED: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "MFU": _mfu,
    "attention whole": lambda row: f"{row['mfu_whole_attention']:.1%}" if "mfu_whole_attention" in row else "",
    "peak GiB": lambda row: f"{row['peak_gib']:.1f}",
    "expected": _expected,
}
"""Columns of what trained."""
TRACE: dict[str, Callable[[dict[str, Any]], str]] = {
    "ms": lambda row: f"{row['milliseconds']:.0f}",
    "computing": lambda row: f"{row['busy']:.0f}",
    "kernels": lambda row: f"{row['kernels']:,}",
    "idle over 20 us": lambda row: f"{row['gaps']['ms']:.0f}",
}
"""Columns of a profiled step."""


def _table(columns: dict[str, Callable[[dict[str, Any]], str]], rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table of the rows that have not failed, in Markdown; nothing if there is no such row."""
    fine = {name: row for name, row in rows.items() if "failed" not in row}
    if not fine:
        return []
    head = ["", f"| program | {' | '.join(columns)} |", f"|{'---|' * (1 + len(columns))}"]
    return [*head, *(f"| {name} | {' | '.join(of(row) for of in columns.values())} |" for name, row in fine.items())]


def main() -> None:
    """Measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=("where", "peers", "sizes"), default="peers")
    parser.add_argument("--output", type=Path, help="the JSON (default: gpu-DEVICE.json in scripts/bench/results)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of it (default: 540)")
    parser.add_argument("--rounds", type=int, default=2, help="of each program (default: 2)")
    parser.add_argument(
        "--steps", type=int, default=8, help="of each program; the first three are left out (default: 8)"
    )
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS, *OTHERS, *SIZES], help="default: all")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    for hidden, kind in {"--part": str, "--folder": Path, "--found": Path, "--parent": int}.items():
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARMING:
        parser.error(f"--steps {args.steps}: the first {WARMING} of each program are left out, so give more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # as an exception, which also ends the part that runs
    if args.part is not None:
        signal_when_parent_dies(signal.SIGTERM)  # or it would go on beside what is started next
        if os.getppid() != args.parent:
            sys.exit("ended")
        args.found.write_text(json.dumps(part(args)))
        return
    if not torch.accelerator.is_available() and not args.small:
        print("no GPU here: nothing was measured (--small tries the script without one)")
        return
    report = measure(args)
    print(f"{summary(report)}\nwrote {args.output}: please send it")


if __name__ == "__main__":
    main()
