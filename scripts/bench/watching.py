"""What it costs a step that the ranks watch each other: steps with and without the watch, in turn, in one run.

OMP_NUM_THREADS=1 deepspeed --num_accelerators 2 scripts/bench/watching.py --rounds 15
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from report import RESULTS, write_report

from harness import Trainer, TrainingArguments
from harness.resilience.process.activity import ACTIVITY
from harness.resilience.watch.watcher import watch_run

STEPS = 4  # of a round with the watch, and of one without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--deepspeed_config", default="pipeline_checkpointing")
    parser.add_argument("--rounds", type=int, default=15, help="pairs that count; one more warms up")
    flags = parser.parse_args()
    ids = torch.randint(0, 256, (64, 256), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        deepspeed_config=flags.deepspeed_config,
        output_dir=str(Path(tempfile.gettempdir()) / "watching"),  # nothing is written
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        max_steps=10_000,
        save_steps=0,
    )
    trainer = Trainer(flags.model, arguments, train_dataset=[{"input_ids": row} for row in ids.tolist()])
    seconds: dict[bool, list[float]] = {True: [], False: []}
    processor = 0.0
    for number in range(flags.rounds + 1):
        for watched in (True, False) if number % 2 else (False, True):
            seconds[watched].append(round_of(trainer, watched))
            processor += processor_seconds() if watched and number else 0.0
    share = processor / (sum(seconds[True][1:]) * STEPS)
    if dist.get_rank() == 0:
        report(flags, trainer, seconds[True][1:], seconds[False][1:], share)


def round_of(trainer: Trainer, watched: bool) -> float:
    """Seconds of some steps that all ranks begin together, a step."""
    ACTIVITY.stop_watching()
    if watched:
        watch_run(trainer.args, trainer.run.groups, trainer.run.console)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        trainer.training_step()
    return (time.perf_counter() - start) / STEPS


def processor_seconds() -> float:
    """Seconds of a processor that the thread that watches has used: they say more than a clock on a busy machine."""
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "watch"]
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def report(flags: argparse.Namespace, trainer: Trainer, watched: list[float], alone: list[float], share: float) -> None:
    """Print the ratio and keep the figures: the median of the pairs' ratios, as the machine drifts."""
    ratio = statistics.median(a / b for a, b in zip(watched, alone, strict=True))
    content = {
        "flags": vars(flags),
        "layout": str(trainer.run.spec.layout),
        "threads": torch.get_num_threads(),
        "watched_s": watched,
        "alone_s": alone,
        "processor_share": share,
        "ratio_of_minima": min(watched) / min(alone),
        "median_of_ratios": ratio,
    }
    path = write_report(RESULTS / "watching.json", content, what=__doc__)
    print(
        f"a watched step takes {ratio:.4f} of one without (median of {len(alone)} pairs), "
        f"the fastest {content['ratio_of_minima']:.4f}; the watch uses {share:.2%} of a processor: {path}"
    )


if __name__ == "__main__":
    main()
