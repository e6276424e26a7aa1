"""Gradients in 8 and 4 bits beside float32: the losses of a training, and the time of a step over a slow network.

    python scripts/bench/gradient_compression.py [--steps 300] [--rounds 3] [--mbit 100]

Two data-parallel ranks train a small llama on text, once with each number of bits. Then, as root, two network
namespaces joined by a cable of `--mbit` Mbit/s stand for two hosts; steps over it are timed in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

from report import RESULTS, write_report

from harness.extras.compression.quantization import wire_share
from harness.topology.env import free_port

BITS = (0, 8, 4)  # 0: float32
LENGTH, SAMPLES, LAST = 64, 4, 30  # tokens of a sample, samples of a rank's step, steps of which losses are averaged
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
HOSTS = ("10.213.78.1", "10.213.78.2")


def rows(count: int) -> list[dict[str, list[int]]]:
    """Return samples of text that every Python has: the bytes of its own modules."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40])
    return [{"input_ids": list(text[start : start + LENGTH])} for start in range(0, count * LENGTH, LENGTH)]


def train(shape: dict[str, int], bits: int, steps: int, folder: Path) -> None:
    """Be a rank; rank 0 writes losses and seconds of the steps."""
    from transformers import LlamaConfig

    from harness import Trainer, TrainingArguments

    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "gradient_compression": {"bits": bits},
    }
    args = TrainingArguments(
        deepspeed_config=config, output_dir=str(folder / "run"), overwrite_output_dir=True, max_steps=steps,
        save_steps=0, verify_plan="off", learning_rate=1e-3, lr_scheduler_type="constant",
    )  # fmt: skip
    model = LlamaConfig(**shape, vocab_size=256, tie_word_embeddings=False, max_position_embeddings=LENGTH)
    trainer = Trainer(model, args, train_dataset=rows(2 * SAMPLES * steps))
    records = [trainer.training_step() for _ in range(steps)]
    if trainer.run.groups.rank == 0:
        found = {"loss": [one.loss for one in records], "seconds": [one.step_seconds for one in records]}
        (folder / "found.json").write_text(json.dumps(found))
    trainer.close()


def run(shape: str, bits: int, steps: int, hosts: Sequence[str] = ()) -> dict[str, list[float]]:
    """Start two ranks, on hosts where they are given; return the losses and seconds of their steps."""
    port, processes = str(free_port()), []
    with tempfile.TemporaryDirectory() as name:
        for rank in range(2):
            own = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0 if hosts else rank, "OMP_NUM_THREADS": 1}
            own |= {"LOCAL_WORLD_SIZE": 1 if hosts else 2, "MASTER_ADDR": HOSTS[0] if hosts else "127.0.0.1"}
            own |= {"MASTER_PORT": port, "DS_ACCELERATOR": "cpu", **({"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {})}
            inside = ["ip", "netns", "exec", hosts[rank]] if hosts else []
            command = [sys.executable, __file__, "--rank-of", shape, str(bits), str(steps), name]
            environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
            with Path(name, f"log-{rank}").open("w") as log:
                processes.append(subprocess.Popen([*inside, *command], env=environment, stdout=log, stderr=log))
        if any(process.wait() for process in processes):
            raise SystemExit("".join(path.read_text()[-2000:] for path in Path(name).glob("log-*")))
        found: dict[str, list[float]] = json.loads(Path(name, "found.json").read_text())
    return found


@contextmanager
def slow_cable(mbit: int) -> Iterator[list[str]]:
    """Create two hosts on a link of this many Mbit/s; return their names."""
    names = [f"dsh{os.getpid() % 100000}{side}" for side in "ab"]
    path = f"{os.environ['PATH']}:/usr/sbin"

    def call(*words: str) -> None:
        subprocess.run(words, check=True, env={**os.environ, "PATH": path})

    try:
        for name in names:
            call("ip", "netns", "add", name)
        call("ip", "link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, HOSTS, strict=True):
            call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                call("ip", "-n", name, "link", "set", device, "up")
            limit = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")
            call("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, env={**os.environ, "PATH": path})


def losses(steps: int) -> dict[str, Any]:
    """Return the mean loss of the last steps with each number of bits, and its ratio to float32's."""
    last = {bits: fmean(run("small", bits, steps)["loss"][-LAST:]) for bits in BITS}
    return {str(bits): {"loss": round(last[bits], 5), "ratio": round(last[bits] / last[0], 5)} for bits in BITS}


def times(mbit: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return the seconds of a step over a slow cable with each number of bits: medians and ratios of rounds."""
    seconds: dict[int, list[float]] = {bits: [] for bits in BITS}
    with slow_cable(mbit) as hosts:
        for _ in range(rounds):
            for bits in BITS:
                seconds[bits].append(median(run("large", bits, steps, hosts)["seconds"][1:]))
    ratio = {bits: [one / of for one, of in zip(seconds[bits], seconds[0], strict=True)] for bits in BITS}
    return {
        str(bits): {
            "step_seconds": round(median(seconds[bits]), 4),
            "ratio": round(median(ratio[bits]), 3),
            "rounds": [round(one, 3) for one in ratio[bits]],
        }
        for bits in BITS
    }


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--rank-of", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        shape, bits, steps, folder = args.rank_of
        train(SMALL if shape == "small" else LARGE, int(bits), int(steps), Path(folder))
        return 0
    report: dict[str, Any] = {
        "steps": args.steps,
        "bytes_on_the_wire_of_float32": {str(bits): round(wire_share(bits), 4) for bits in BITS[1:]},
        "losses": losses(args.steps),
    }
    print(json.dumps(report["losses"], indent=1), flush=True)
    if os.geteuid() == 0 and shutil.which("tc", path=f"{os.environ['PATH']}:/usr/sbin"):
        report |= {"mbit_per_second": args.mbit, "over_the_cable": times(args.mbit, args.rounds, steps=6)}
        print(json.dumps(report["over_the_cable"], indent=1))
    else:
        print("no slow network here: that takes root, and tc")
    write_report(RESULTS / "gradient_compression.json", report, what=str(__doc__))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
