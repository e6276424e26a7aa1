"""What each pipeline schedule takes for a step, compared with DeepSpeed's own, with the same losses.

A llama of 17 million parameters is cut into two stages and trained on eight micro-batches a step with each schedule, in
turns in the same processes. The ratios are of the fastest step of each round, which is the least disturbed one; on a
machine with a load of more than the two ranks, which the report holds, waiting stages give their time to others, and
the ratios say little:

    OMP_NUM_THREADS=1 python scripts/bench/schedules.py [--rounds 6] [--steps 4]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from harness import Trainer, TrainingArguments  # noqa: E402
from harness.config.values.batch import bubble  # noqa: E402
from harness.config.values.layout_keys import SCHEDULES  # noqa: E402
from scripts.bench.report import RESULTS, write_report  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402

STAGES, MICRO_BATCHES, SAMPLES, LENGTH = 2, 8, 1, 128
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="of each schedule and round; the first is left out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, options.rounds, options.steps)
        rounds = run_ranks(STAGES, "scripts.bench.schedules:train_rounds", *arguments, timeout_s=900)[0]
    seconds = {name: [each[name]["step_s"] for each in rounds] for name in SCHEDULES}
    own = SCHEDULES[0]
    ratios = {name: [one / base for one, base in zip(seconds[name], seconds[own], strict=True)] for name in SCHEDULES}
    report = {
        "stages": STAGES,
        "micro_batches": MICRO_BATCHES,
        "load_average_of_the_minutes_1_5_15": [round(each, 1) for each in os.getloadavg()],
        "cores": os.cpu_count(),
        "tokens_per_step": MICRO_BATCHES * SAMPLES * LENGTH,
        "model": SHAPE,
        "schedules": {
            name: {
                "step_s": [round(each, 3) for each in seconds[name]],
                f"of_{own}": [round(each, 3) for each in ratios[name]],
                f"median_of_{own}": round(median(ratios[name]), 3),
                "idle_share_of_the_formula": round(bubble(STAGES, MICRO_BATCHES, name), 3),
            }
            for name in SCHEDULES
        },
        "losses_are_equal": all(each[name]["losses"] == each[own]["losses"] for each in rounds for name in SCHEDULES),
    }
    print(json.dumps(report["schedules"], indent=1))
    write_report(RESULTS / "schedules.json", report, what=__doc__)


def train_rounds(folder: str, rounds: int, steps: int) -> list[dict[str, dict[str, Any]]]:
    """Train with each schedule in turns; return of each round and schedule the losses and the seconds of a step."""
    return [{name: train(f"{folder}/{turn}-{name}", name, steps) for name in SCHEDULES} for turn in range(rounds)]


def train(folder: str, schedule: str, steps: int) -> dict[str, Any]:
    """Train some steps with one schedule; return losses and the seconds of the fastest."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "pipeline": {"stages": STAGES, "schedule": schedule},
        "zero_optimization": {"stage": 1},
    }
    args = TrainingArguments(
        deepspeed_config=config, output_dir=folder, max_steps=steps, save_steps=0, verify_plan="off", logging_steps=1
    )
    ids = torch.randint(0, SHAPE["vocab_size"], (64, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    trainer = Trainer(LlamaConfig(**SHAPE), args, [{"input_ids": row} for row in ids])
    records = [trainer.training_step() for _ in range(steps)]
    trainer.close()
    return {
        "losses": [record.loss for record in records],
        "step_s": min(record.step_seconds for record in records[1:]),
    }


if __name__ == "__main__":
    main()
