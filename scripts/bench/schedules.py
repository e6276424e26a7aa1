"""How long the stages of a pipeline idle under each schedule, by the clock, beside the formula of the schedule.

Four stages train a small llama on eight micro-batches a step, with each schedule in turn in the same processes. Each
pass waits a fixed time for each of its layers besides its computation, a backward pass twice as long as a forward pass.
So ranks that share cores behave as machines of their own, as long as the waits are much longer than the computation. A
stage is busy from the begin to the end of each pass; the step lasts from the first pass of any stage to the last one's
end, without the optimizer's step:

    OMP_NUM_THREADS=1 python scripts/bench/schedules.py [--steps 5] [--pass_s 0.16]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from harness import Trainer, TrainingArguments  # noqa: E402
from harness.config.values.batch import bubble  # noqa: E402
from harness.deepspeed.schedule import Observer  # noqa: E402
from harness.schedules import SCHEDULES, model_chunks  # noqa: E402
from scripts.bench.report import RESULTS, write_report  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

STAGES, MICRO_BATCHES, SAMPLES, LENGTH = 4, 8, 1, 16
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
WARM_STEPS = 2
UNITS = {"ForwardPass": 1, "BackwardPass": 2, "InputGradients": 1, "WeightGradients": 1}


@dataclass
class PassClock:
    """Makes each pass of a rank wait, and notes when it begins and ends."""

    wait_s: float = 0.0  # of a forward pass
    spans: list[tuple[float, float]] = field(default_factory=list)
    _begin: float | None = None

    def begin(self, instruction: str, _place: object) -> None:
        units = UNITS.get(instruction, 0)
        self._begin = time.perf_counter() if units else None
        time.sleep(units * self.wait_s)

    def end(self, _instruction: str, _place: object) -> None:
        if self._begin is not None:
            self.spans.append((self._begin, time.perf_counter()))
            self._begin = None

    def taken(self) -> list[tuple[float, float]]:
        """Return the spans since the last call."""
        taken, self.spans = self.spans, []
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="of each schedule; the first two are left out")
    parser.add_argument("--pass_s", type=float, default=0.16, help="wait of a layer's forward pass")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, options.steps, options.pass_s)
        ranks = run_ranks(STAGES, "scripts.bench.schedules:train_with_each", *arguments, timeout_s=600)
    report = {
        "stages": STAGES,
        "micro_batches": MICRO_BATCHES,
        "forward_pass_of_a_layer_s": options.pass_s,
        "load_average_of_the_minutes_1_5_15": [round(each, 1) for each in os.getloadavg()],
        "cores": os.cpu_count(),
        "model": SHAPE,
        "schedules": {name: compared(name, [rank[name]["spans"] for rank in ranks]) for name in SCHEDULES},
        "losses_are_equal": len({str(rank[name]["losses"]) for rank in ranks for name in SCHEDULES}) == 1,
    }
    for name, each in report["schedules"].items():
        print(f"| `{name}` | {each['formula']:.3f} | {each['measured']:.3f} | {each['of_the_formula']:.2f} |")
    write_report(RESULTS / "schedules.json", report, what=__doc__)


def compared(schedule: str, of_ranks: list[list[list[tuple[float, float]]]]) -> dict[str, Any]:
    """Compare the idle share of each step, from each rank's passes, with the formula."""
    shares = [idle_share(list(step)) for step in zip(*of_ranks, strict=True)]
    formula = bubble(STAGES, MICRO_BATCHES, schedule)
    return {
        "formula": round(formula, 4),
        "measured": round(median(shares), 4),
        "of_the_formula": round(median(shares) / formula, 3),
        "steps": [round(share, 4) for share in shares],
    }


def idle_share(ranks: list[list[tuple[float, float]]]) -> float:
    """Return the share of a step in which stages compute nothing, from the begin and end of each rank's passes."""
    begin = min(start for rank in ranks for start, _ in rank)
    end = max(stop for rank in ranks for _, stop in rank)
    busy = sum(stop - start for rank in ranks for start, stop in rank)
    return 1 - busy / (len(ranks) * (end - begin))


def train_with_each(folder: str, steps: int, pass_s: float) -> dict[str, dict[str, Any]]:
    """Train with each schedule; return of each the losses and this rank's passes in each step that waits."""
    return {name: train(f"{folder}/{name}", name, steps, pass_s) for name in SCHEDULES}


def train(folder: str, schedule: str, steps: int, pass_s: float) -> dict[str, Any]:
    """Train some steps with one schedule, each pass of which waits."""
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
    clock, chunks = PassClock(), model_chunks(STAGES, schedule)
    stop = trainer.run.engine.deepspeed.observe(Observer(begin=clock.begin, end=clock.end))
    losses, spans = [], []
    for step in range(steps):
        clock.wait_s = 0.0 if step < WARM_STEPS else pass_s * SHAPE["num_hidden_layers"] / chunks.count
        losses.append(trainer.training_step().loss)
        spans.append(clock.taken())
    stop()
    trainer.close()
    return {"losses": losses, "spans": spans[WARM_STEPS:]}


if __name__ == "__main__":
    main()
