"""Go on from a checkpoint in another layout: how far the next 20 losses are from those of the unbroken run.

Every one of nine layouts (pipeline stages, tensor parallelism, data parallelism, ZeRO stages 0 to 3, on 1, 2 and 4
ranks) trains a tiny model and leaves a checkpoint at step 5. Every layout then goes on from every one of the nine. The
losses are compared with those of one process that was never stopped, relative to them; a layout that goes on from its
own checkpoint must give its own unbroken losses to the bit.

    OMP_NUM_THREADS=1 python scripts/bench/reshape.py [--families llama gpt2 mixtral gemma2 lora]

A family takes some five minutes on two cores. Results of other families in the file stay.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness import Trainer, TrainingArguments  # noqa: E402
from scripts.bench.report import RESULTS, write_report  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.training import Job, rows, tiny_model  # noqa: E402

RESULT = RESULTS / "reshape.json"
LAYOUTS = {
    1: ["z0"],
    2: ["pp2z1", "tp2z0", "dp2z2", "dp2z3"],
    4: ["pp2tp2z1", "pp2dp2z0", "tp2dp2z1", "tp2dp2z3"],
}
NAMES = [name for names in LAYOUTS.values() for name in names]
FAMILIES = ("llama", "gpt2", "mixtral", "gemma2", "lora")
SAVED_AT, STEPS = 5, 25
TRAIN_ALL = "scripts.bench.reshape:train_all"
MOST = 1e-5  # what the losses may differ by, in float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    flags = parser.parse_args()
    before = json.loads(RESULT.read_text())["families"] if RESULT.is_file() else {}
    for family in flags.families:
        with tempfile.TemporaryDirectory() as folder:
            before[family] = summary(*all_pairs(family, Path(folder)))
        print(family, json.dumps({key: before[family][key] for key in ("worst", "own_layout_to_the_bit")}), flush=True)
        write_report(RESULT, {"steps": STEPS - SAVED_AT, "families": before}, what=__doc__)
    if any(found["worst"] > MOST or not found["own_layout_to_the_bit"] for found in before.values()):
        raise SystemExit("a layout does not go on as the unbroken run")


def all_pairs(family: str, folder: Path) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    """Return the unbroken losses of each layout, and by layout and saved layout those that follow a resume."""
    model = tiny_model(folder / "model", "llama" if family == "lora" else family, tied=family != "mixtral")
    unbroken: dict[str, list[float]] = {}
    resumed: dict[str, dict[str, list[float]]] = {}
    for size, names in LAYOUTS.items():
        runs = [(Job(model, name), "") for name in names]
        curves = run_ranks(size, TRAIN_ALL, runs, str(folder), family, timeout_s=600)[0]
        unbroken |= dict(zip(names, curves, strict=True))
    for size, names in LAYOUTS.items():
        runs = [(Job(model, name), saved) for name in names for saved in NAMES]
        curves = run_ranks(size, TRAIN_ALL, runs, str(folder), family, timeout_s=1800)[0]
        for (job, saved), losses in zip(runs, curves, strict=True):
            resumed.setdefault(job.layout, {})[saved] = losses
    return unbroken, resumed


def train_all(runs: list[tuple[Job, str]], folder: str, family: str) -> list[list[float]]:
    """Train each job, from the start or from the checkpoint of the layout named beside it; return the losses."""
    return [train(job, saved, Path(folder), family) for job, saved in runs]


def train(job: Job, saved: str, folder: Path, family: str) -> list[float]:
    place = folder / (f"{job.layout}-after-{saved}" if saved else job.layout)
    args = TrainingArguments(
        deepspeed_config=job.deepspeed_config(),
        output_dir=str(place),
        max_steps=STEPS,
        save_steps=0 if saved else SAVED_AT,
        save_total_limit=None,
        resume_from_checkpoint=str(folder / saved / f"checkpoint-{SAVED_AT}") if saved else None,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
    )
    data = rows(masked=True) + rows(masked=True)[:5]  # 13 samples: a batch reaches into the next epoch
    trainer = Trainer(job.model, args, data, peft_config=adapters() if family == "lora" else None)
    trainer.train()
    trainer.close()
    return [json.loads(line)["loss"] for line in (place / "metrics.jsonl").read_text().splitlines()]


def adapters() -> Any:
    """Return peft's config of adapters on attention and MLP."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)


def summary(unbroken: dict[str, list[float]], resumed: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Compare with the unbroken run of one process; by layout and saved layout the largest relative difference."""
    wanted = unbroken["z0"][SAVED_AT:]
    table = {
        layout: {saved: largest(losses, wanted) for saved, losses in found.items()} for layout, found in resumed.items()
    }
    return {
        "worst": max(max(row.values()) for row in table.values()),
        "own_layout_to_the_bit": all(resumed[name][name] == unbroken[name][SAVED_AT:] for name in NAMES),
        "largest_difference": table,
    }


def largest(found: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference, to two digits."""
    return float(f"{max(abs(a - b) / b for a, b in zip(found, wanted, strict=True)):.1e}")


if __name__ == "__main__":
    main()
