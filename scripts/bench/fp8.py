"""Linear layers in fp8 beside bf16: the losses of a training, by emulation on a CPU.

    python scripts/bench/fp8.py [--steps 300]

A small llama trains on text in bf16, with and without `--fp8 emulate`, on the same samples from the same weights. A
third run in bf16 from another seed shows how much a loss depends on that.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from report import RESULTS, write_report

LENGTH, SAMPLES, LAST = 64, 8, 30  # tokens of a sample, samples of a step, steps of which losses are averaged
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "tie_word_embeddings": False,
    "max_position_embeddings": LENGTH,
}
RUNS = {"bf16": ("no", 42), "fp8": ("emulate", 42), "bf16, another seed": ("no", 43)}


def rows(count: int) -> list[dict[str, list[int]]]:
    """Return samples of text that every Python has: the bytes of its own modules."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60])
    return [{"input_ids": list(text[start : start + LENGTH])} for start in range(0, count * LENGTH, LENGTH)]


def losses(fp8: str, seed: int, steps: int) -> list[float]:
    """Train, and return the loss of each step."""
    from transformers import LlamaConfig

    from harness import Trainer, TrainingArguments

    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            deepspeed_config=config, output_dir=folder, overwrite_output_dir=True, max_steps=steps, save_steps=0,
            verify_plan="off", learning_rate=1e-3, lr_scheduler_type="constant", fp8=fp8, seed=seed, use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(LlamaConfig(**SHAPE), args, train_dataset=rows(SAMPLES * steps))
        found = [trainer.training_step().loss for _ in range(steps)]
        trainer.close()
    return found


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    found = {name: losses(*settings, steps) for name, settings in RUNS.items()}
    table: dict[str, Any] = {
        name: {
            **{f"step {at}": round(curve[at - 1], 4) for at in (1, 10, 100, 200, 300) if at <= steps},
            f"mean of the last {LAST}": round(fmean(curve[-LAST:]), 4),
            "ratio": round(fmean(curve[-LAST:]) / fmean(found["bf16"][-LAST:]), 4),
        }
        for name, curve in found.items()
    }
    print(json.dumps(table, indent=1))
    write_report(RESULTS / "fp8.json", {"steps": steps, "losses": table}, what=str(__doc__))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
