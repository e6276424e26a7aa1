"""What a step through the Trainer costs beside the same step by hand on `PipelineEngine.train_batch`.

Both run in turn on one engine in one process group, on the same micro-batches, so that a drift of the machine hits
both alike; the figure is the ratio of the medians. Run it under the launcher:

    OMP_NUM_THREADS=1 deepspeed --num_accelerators 2 scripts/bench/overhead.py --rounds 20
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from report import RESULTS, write_report

from harness import Trainer, TrainingArguments
from harness.batches.evaluation import EvaluationBatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--deepspeed_config", default="pipeline_checkpointing")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of steps that count; two more warm up")
    parser.add_argument("--block_size", type=int, default=256)
    flags = parser.parse_args()
    ids = torch.randint(0, 256, (64, flags.block_size), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        deepspeed_config=flags.deepspeed_config,
        output_dir=str(Path(tempfile.gettempdir()) / "overhead"),  # the same on every rank; nothing is written
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        max_steps=10_000,
        save_steps=0,
    )
    trainer = Trainer(flags.model, arguments, train_dataset=[{"input_ids": row} for row in ids.tolist()])
    ours, by_hand = [], []
    for _ in range(flags.rounds + 2):
        ours.append(timed(trainer.training_step))
        by_hand.append(timed(lambda: step_by_hand(trainer)))
    ratio = statistics.median(ours[2:]) / statistics.median(by_hand[2:])
    if dist.get_rank() == 0:
        report(flags, trainer, ours[2:], by_hand[2:], ratio)


def step_by_hand(trainer: Trainer) -> None:
    """Do what a user's own loop would: take the micro-batches, call train_batch, read the loss."""
    engine = trainer.engine
    batches = BATCHES.setdefault("ready", prepared(trainer))
    float(engine.deepspeed.train_batch(iter(batches)))


BATCHES: dict[str, list] = {}


def prepared(trainer: Trainer) -> list:
    """One step's micro-batches with their targets, made ready before the clock runs."""
    engine = trainer.engine
    whole = [EvaluationBatch(inputs=x, labels=y, rows=len(y)) for x, y in trainer.stream.next_step()]
    return engine.weigh(whole, engine.count(whole))


def timed(step) -> float:
    """Seconds of one step that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def report(flags: argparse.Namespace, trainer: Trainer, ours: list, by_hand: list, ratio: float) -> None:
    """Print the ratio and keep the figures."""
    content = {
        "flags": vars(flags),
        "layout": str(trainer.run.spec.layout),
        "device": trainer.engine.device.type,
        "threads": torch.get_num_threads(),
        "trainer_s": ours,
        "by_hand_s": by_hand,
        "ratio_of_medians": ratio,
    }
    path = write_report(RESULTS / "overhead.json", content, what=__doc__)
    print(
        f"a step through the Trainer takes {ratio:.4f} of the step by hand "
        f"({statistics.median(ours):.4f} s and {statistics.median(by_hand):.4f} s, {len(ours)} pairs): {path}"
    )


if __name__ == "__main__":
    main()
