"""What it gains to move layers between pipeline stages while a run lives.

A llama whose output layer is the most expensive one is cut into two stages of equally many layers, and trained with and
without `--rebalance_steps`, in turns. The median seconds of a step after the move are compared with those of the run
that stays as it is cut, and all losses:

    OMP_NUM_THREADS=1 python scripts/bench/rebalancing.py
"""

from __future__ import annotations

import json
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
from scripts.bench.report import RESULTS, write_report  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

ROUNDS, STEPS, MOVE_AT, LENGTH = 2, 14, 4, 128
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "pipeline": {"stages": 2, "partition": "uniform"},
}
SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def main() -> None:
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            plain, moved = (
                run_ranks(2, "scripts.bench.rebalancing:train", f"{folder}/{number}-{steps}", steps, timeout_s=600)[0]
                for steps in (None, MOVE_AT)
            )
            difference = max(abs(a - b) / a for a, b in zip(plain["losses"], moved["losses"], strict=True))
            rounds.append(
                {
                    "step_s": plain["step_s"],
                    "step_s_rebalanced": moved["step_s"],
                    "ratio": round(moved["step_s"] / plain["step_s"], 3),
                    "boundaries": [plain["boundaries"], moved["boundaries"]],
                    "largest_difference_of_losses": float(f"{difference:.1e}"),
                }
            )
            print(json.dumps(rounds[-1]), flush=True)
    write_report(RESULTS / "rebalancing.json", {"rounds": rounds}, what=__doc__)


def train(folder: str, rebalance_steps: int | None) -> dict[str, Any]:
    """Return the losses, the boundaries at the end, and the median seconds of the steps after the move."""
    args = TrainingArguments(
        deepspeed_config=CONFIG,
        output_dir=folder,
        max_steps=STEPS,
        save_steps=0,
        rebalance_steps=rebalance_steps,
        verify_plan="off",
    )
    ids = torch.randint(0, SHAPE["vocab_size"], (64, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    trainer = Trainer(LlamaConfig(**SHAPE), args, [{"input_ids": row} for row in ids])
    trainer.train()
    boundaries = trainer.run.boundaries
    trainer.close()
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    seconds = [row["step_seconds"] for row in rows[MOVE_AT + 1 :]]  # the first step after the move warms up
    return {
        "losses": [row["loss"] for row in rows],
        "boundaries": boundaries,
        "step_s": round(median(seconds), 3),
    }


if __name__ == "__main__":
    main()
