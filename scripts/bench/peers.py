"""The harness beside other ways to train the same model on the same cores, in one run.

    python scripts/bench/peers.py [--rounds 3] [--steps 3] [--only NAME ...] [--experts | --cable MBIT]

A llama of 17 million parameters in float32, AdamW, clipping, eight micro-batches of 4 x 256 tokens a step. One process
has a thread for each core, ranks have one. Every round makes some steps with each program, in new processes; the first
step is left out. The losses of all programs are compared, except those of the two ranks that exchange nothing: they
show what data parallelism in plain PyTorch could reach at most. Writes results/peers.json, from which `draw_peers.py`
makes the table and the picture of the docs. With --experts the model is a mixtral of eight experts, of which a token
meets two, and one process runs them one after the other, or in grouped products; it writes results/experts.json.
With --cable two hosts have a rank each: network namespaces with a cable of so many Mbit/s between them (0: no limit),
which take root to make. It writes results/cable-MBIT.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from cable import Host, two_hosts
from peer_programs.task import Task, Work
from report import RESULTS, write_report

from harness.topology.env import free_port

BASE = "one process"
BOUND = "two ranks without exchange"
PROGRAMS = {
    BASE: ("plain_torch", "one_process", 1),
    "harness, one process": ("trainers", "harness_one", 1),
    BOUND: ("plain_torch", "apart", 2),
    "DDP": ("plain_torch", "ddp", 2),
    "DeepSpeed ZeRO-1": ("raw_deepspeed", "zero1", 2),
    "harness, ZeRO-1": ("trainers", "harness_zero1", 2),
    "FSDP2": ("plain_torch", "fsdp2", 2),
    "DeepSpeed ZeRO-3": ("raw_deepspeed", "zero3", 2),
    "HF Trainer, ZeRO-3": ("trainers", "hf_zero3", 2),
    "harness, ZeRO-3": ("trainers", "harness_zero3", 2),
    "torch 1F1B": ("plain_torch", "pipelining", 2),
    "DeepSpeed PipelineEngine": ("raw_deepspeed", "pipeline", 2),
    "harness, 1F1B": ("trainers", "harness_pipeline", 2),
    "harness, zero-bubble": ("trainers", "harness_zero_bubble", 2),
    "torch DTensor": ("plain_torch", "dtensor", 2),
    "DeepSpeed AutoTP": ("raw_deepspeed", "autotp", 2),
    "harness, tensor parallel": ("trainers", "harness_tensor", 2),
}
"""Of each program: its module, its function, and its processes."""
EXPERT_BASE = "one process, expert by expert"
OF_EXPERTS = {
    EXPERT_BASE: ("plain_torch", "one_by_one", 1),
    "harness, experts apart": ("trainers", "harness_experts", 2),
    "DeepSpeed AutoEP": ("raw_deepspeed", "autoep", 2),
}
WITH_EXPERTS = [EXPERT_BASE, BASE, "harness, experts apart", "harness, ZeRO-1", "harness, ZeRO-3", "DeepSpeed ZeRO-3"]
WITH_EXPERTS += ["DeepSpeed AutoEP"]
WORK = Work(
    shape={
        "vocab_size": 8192,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "tie_word_embeddings": False,
    },
    micro_batches=8,
    samples=4,
    length=256,
)
EXPERT_WORK = Work(
    family="mixtral",
    shape={
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    micro_batches=4,
    samples=4,
    length=128,
)
SMALL = {"vocab_size": 256, "hidden_size": 96}
TOLERANCE = 1e-4  # of a loss
LIMIT_S = 300


def train(name: str, folder: Path, steps: int, hosts: Sequence[Host] = ()) -> dict[str, list[float]]:
    """Run a program in processes of its own, each on its host if there are any; return losses and seconds of steps."""
    ranks, port = (PROGRAMS | OF_EXPERTS)[name][2], str(free_port())
    threads = (os.cpu_count() or 1) // ranks
    processes = []
    for rank in range(ranks):
        on_host = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1} if hosts else {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        place = {"RANK": rank, "WORLD_SIZE": ranks, **on_host} if ranks > 1 else {}
        address = hosts[0].address if hosts else "127.0.0.1"
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": port} if ranks > 1 else {}
        if hosts and ranks > 1:
            meeting |= {"GLOO_SOCKET_IFNAME": hosts[rank].interface, "CROSS_RANK": rank, "CROSS_SIZE": ranks}
        own = {"OMP_NUM_THREADS": threads, "DS_ACCELERATOR": "cpu", **place, **meeting}
        command = [sys.executable, __file__, "--program", name, "--folder", str(folder), "--steps", str(steps)]
        command = hosts[rank].command(command) if hosts and ranks > 1 else command
        environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
        with (folder / f"log-{rank}.txt").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        log = "\n".join((folder / f"log-{rank}.txt").read_text()[-2000:] for rank in range(ranks))
        raise SystemExit(f"{name} failed:\n{log}")
    found: dict[str, list[float]] = json.loads((folder / "found.json").read_text())
    return found


def run_program(name: str, folder: Path, steps: int) -> None:
    """Be a rank of a program."""
    module, function, _ = (PROGRAMS | OF_EXPERTS)[name]
    task = Task(folder, steps)
    getattr(import_module(f"peer_programs.{module}"), function)(task)
    if task.rank == 0:
        (folder / "found.json").write_text(json.dumps({"losses": task.losses, "seconds": task.seconds}))


def summary(work: Work, rounds: list[dict[str, dict[str, list[float]]]], base_name: str) -> dict[str, Any]:
    """Return the speed of each program, its share of one process's in the same round, and how its losses differ."""
    rows: dict[str, dict[str, Any]] = {}
    for name in rounds[0]:
        speeds = [work.tokens / min(one[name]["seconds"][1:]) for one in rounds]
        base = [work.tokens / min(one[base_name]["seconds"][1:]) for one in rounds]
        shares = [speed / of for speed, of in zip(speeds, base, strict=True)]
        wanted = rounds[0][base_name]["losses"]
        rows[name] = {
            "ranks": (PROGRAMS | OF_EXPERTS)[name][2],
            "tokens_per_second": [round(speed, 1) for speed in speeds],
            "of_one_process": [round(share, 3) for share in shares],
            "median_of_one_process": round(median(shares), 3),
        }
        if name != BOUND:
            pairs = (pair for one in rounds for pair in zip(one[name]["losses"], wanted, strict=True))
            rows[name]["loss_difference"] = max(abs(a - b) for a, b in pairs)
    return rows


def main() -> int:
    """Make the rounds, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS | OF_EXPERTS))
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--cable", type=int, metavar="MBIT", help="two hosts, a rank each")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the programs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program is not None:
        run_program(args.program, args.folder, args.steps)
        return 0
    base, known = (EXPERT_BASE, WITH_EXPERTS) if args.experts else (BASE, list(PROGRAMS))
    work = EXPERT_WORK if args.experts else WORK
    if args.small:
        work = replace(work, shape={**work.shape, **SMALL}, length=32)
    names = list(dict.fromkeys([base, *(args.only or known)]))
    rounds = []
    between = nullcontext(()) if args.cable is None else two_hosts(args.cable)
    with tempfile.TemporaryDirectory() as name, between as hosts:
        work.write(Path(name))
        for _ in range(args.rounds):
            rounds.append({})
            for program in names:
                rounds[-1][program] = found = train(program, Path(name), args.steps, hosts)
                print(f"{program}: {work.tokens / min(found['seconds'][1:]):,.0f} tokens/s", flush=True)
    rows = summary(work, rounds, base)
    worst = max(row["loss_difference"] for name, row in rows.items() if name != BOUND)
    load = [round(each, 1) for each in os.getloadavg()]
    content = {"work": asdict(work), "cores": os.cpu_count(), "load_average": load, "cable_mbit": args.cable}
    written = "experts.json" if args.experts else "peers.json" if args.cable is None else f"cable-{args.cable}.json"
    output = args.output or RESULTS / written
    write_report(output, {**content, "worst_loss_difference": worst, "programs": rows}, what=str(__doc__))
    for name, row in rows.items():
        print(
            f"{name:28}{row['median_of_one_process']:.2f}   {row['of_one_process']}  {row.get('loss_difference', '-')}"
        )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
