"""Step time and peak memory of layouts on this machine, as `ds-harness plan` predicts them and as they are measured.

Measures the machine (`ds-harness plan --calibrate`), ranks what 2 and 4 ranks can run, and trains an even sample of
both rankings, or all of them, in turns. Ranks are forked from a process that has imported everything. A step is the
fastest of its round, and the median over the rounds. Memory is the peak of the resident set during the steps, of the
rank that needs most, over that of ranks which train next to nothing: `peak_gib` of a run of its own, in which the C
library gives freed memory back at once, so that it is what tensors take; `kept_gib` of the timed runs, where it keeps
freed memory. Needs a quiet machine, and about ten minutes:

    OMP_NUM_THREADS=1 python scripts/bench/layouts.py [--sample 3 | --all] [--rounds 2] [--steps 4]

Whether the recommended layout is the fastest is asked of all that are predicted to be nearly as fast, without memory:

    OMP_NUM_THREADS=1 python scripts/bench/layouts.py --ranks 4 --within 1.2 --rounds 1 --output best-layouts.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness import Trainer, TrainingArguments  # noqa: E402
from harness.device.memory import peak_bytes, reset_peak  # noqa: E402
from harness.planner.calibrate import calibrate  # noqa: E402
from harness.planner.estimate import Estimate  # noqa: E402
from harness.planner.hardware import GIB, load_hardware  # noqa: E402
from harness.planner.model_config import decoder_of  # noqa: E402
from harness.planner.preset import preset  # noqa: E402
from harness.planner.search import Task, search  # noqa: E402
from harness.planner.workload import Strategy, Workload  # noqa: E402
from scripts.bench.report import RESULTS, write_report  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

LENGTH, SAMPLES, LIMIT_S = 128, 8, 300
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # of glibc: a larger block is a mapping of its own
MEMORY_STEPS = 2  # the second has the optimizer's states from its beginning
COMMON = {"model_type": "llama", "max_position_embeddings": LENGTH, "tie_word_embeddings": False}
NOTHING = COMMON | {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64,
}  # fmt: skip
MODELS = {
    "deep": COMMON | {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
        "vocab_size": 8192,
    },
    "wide": COMMON | {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 16384,
    },
}  # fmt: skip


@dataclass
class Measured:
    """A layout of a model with its prediction. Of each round the seconds of a step and the bytes of the peak (`kept`);
    and the peak where freed memory is given back."""

    model: str
    predicted: Estimate
    seconds: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    peak: float = 0.0

    @property
    def ranks(self) -> int:
        """Of the run."""
        return self.predicted.strategy.world_size

    def errors(self, empty: float) -> tuple[float, float]:
        """Return the relative errors of the predicted seconds and of the predicted peak over `empty`; 0 if it was not
        measured."""
        time = self.predicted.seconds.total / median(self.seconds) - 1
        return time, self.predicted.peak_bytes / (self.peak - empty) - 1 if self.peak else 0.0

    def row(self, empty: float) -> dict[str, Any]:
        """Return what is reported of it."""
        row = self.predicted.row()
        time, memory = self.errors(empty)
        kept = ("layout", "zero_stage", "micro_batch", "gradient_accumulation_steps", "activation_checkpointing")
        return {
            "model": self.model,
            **{key: row[key] for key in (*kept, "schedule", "chunks_per_stage", "sequence_parallel")},
            "step_s": {"predicted": round(row["step_seconds"]["total"], 4), "measured": round(median(self.seconds), 4)},
            "rounds_s": [round(each, 4) for each in self.seconds],
            "peak_gib": {
                "predicted": round(row["memory_gib"]["max"], 4),
                "measured": round((self.peak - empty) / GIB, 4) if self.peak else None,
            },
            "kept_gib": round((median(self.kept) - empty) / GIB, 4),
            "error": {"step": round(time, 4), "memory": round(memory, 4)},
        }


def train(model: dict[str, Any], config: dict[str, Any], steps: int, folder: str) -> tuple[float, float]:
    """Train some steps; return the seconds of the fastest and the peak of the resident set. Runs on each rank."""
    import torch
    from transformers import LlamaConfig

    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model["vocab_size"], (steps * SAMPLES, LENGTH), generator=draw).tolist()
    args = TrainingArguments(
        deepspeed_config=config, output_dir=folder, max_steps=steps, save_steps=0, verify_plan="off", logging_steps=1,
        overwrite_output_dir=True,
    )  # fmt: skip
    trainer = Trainer(LlamaConfig(**model), args, [{"input_ids": row} for row in ids])
    reset_peak(torch.device("cpu"))
    records = [trainer.training_step() for _ in range(steps)]
    found = min(record.step_seconds for record in records[1:]), float(peak_bytes(torch.device("cpu")))
    trainer.close()
    return found


def run(
    ranks: int, model: dict[str, Any], strategy: Strategy, steps: int, env: Mapping[str, str] | None = None
) -> tuple[float, float]:
    """Return seconds of a step and peak bytes of a layout: of the slowest rank, and of the one that needs most."""
    with tempfile.TemporaryDirectory() as folder:
        each = run_ranks(
            ranks, "scripts.bench.layouts:train", model, preset(strategy, "fp32"), steps, f"{folder}/run",
            timeout_s=LIMIT_S, env=env,
        )  # fmt: skip
    return max(seconds for seconds, _ in each), max(peak for _, peak in each)


def choose(hardware: Path, ranks: int, sample: int | None, within: float | None = None) -> list[Measured]:
    """Return the layouts to train, best first: all, or an even sample with the recommended one, or those that are
    predicted to take at most `within` times as long as that."""
    device, chosen = load_hardware(str(hardware), ranks), []
    for name, model in MODELS.items():
        work = Workload(shape=decoder_of(model, name), sequence=LENGTH, precision="fp32", on_cpu=True)
        found = search(Task(hardware=device, workload=work, world_size=ranks, global_batch=SAMPLES)).fitting
        stride = 1 if sample is None or within else max(1, len(found) // sample)
        limit = found[0].seconds.total * (within or float("inf"))
        kept = [one for one in found[::stride] if one.seconds.total <= limit]
        chosen += [Measured(name, one) for one in (kept if within else kept[:sample])]
    return chosen


def ranks_of(values: list[float]) -> list[float]:
    """Return the place of each value, equal ones sharing theirs."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def spearman(first: list[float], second: list[float]) -> float:
    """Return the rank correlation of two lists."""
    a, b = ranks_of(first), ranks_of(second)
    middle = fmean(a)
    top = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    squares = sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)
    return top / squares**0.5 if squares else 0.0


def summary(name: str, ranks: int, group: list[Measured], empty: float) -> dict[str, Any]:
    """Return the errors over the layouts of one model and number of ranks, and how far the recommended one is off."""
    times, memory = zip(*(one.errors(empty) for one in group), strict=True)
    measured = [median(one.seconds) for one in group]
    return {
        "model": name,
        "ranks": ranks,
        "layouts": len(group),
        "step_mean_error": round(fmean(map(abs, times)), 4),
        "step_mean_signed": round(fmean(times), 4),
        "spearman": round(spearman([one.predicted.seconds.total for one in group], measured), 3),
        "memory_mean_error": round(fmean(map(abs, memory)), 4),
        "memory_worst_error": round(max(map(abs, memory)), 4),
        "recommended_over_best_measured": round(measured[0] / min(measured) - 1, 4),
    }


def over_all(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors over all layouts, and the correlation of their order, across models and numbers of ranks."""
    times, memory = ([abs(row["error"][key]) for row in rows] for key in ("step", "memory"))
    predicted, measured = ([row["step_s"][key] for row in rows] for key in ("predicted", "measured"))
    return {
        "layouts": len(rows),
        "step_mean_error": round(fmean(times), 4),
        "step_worst_error": round(max(times), 4),
        "spearman": round(spearman(predicted, measured), 3),
        "memory_mean_error": round(fmean(memory), 4),
        "memory_worst_error": round(max(memory), 4),
    }


def main() -> None:
    """Measure, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sample", type=int, default=3, help="layouts of each model and number of ranks")
    parser.add_argument("--all", action="store_true", help="every layout")
    parser.add_argument("--within", type=float, help="every layout predicted to be within this factor of the "
                        "recommended one's time; memory is not measured")  # fmt: skip
    parser.add_argument("--output", default="layouts.json", help="in results/")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is left out")
    options = parser.parse_args()
    rows, summaries, empties = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        hardware = Path(folder, "machine.json")
        calibrate(hardware)
        machine = json.loads(hardware.read_text(encoding="utf-8"))
        for ranks in options.ranks:
            plain = Strategy(dp_size=ranks, accumulation=SAMPLES // ranks)
            empty = empties[ranks] = run(ranks, NOTHING, plain, MEMORY_STEPS, GIVES_BACK)[1]
            chosen = choose(hardware, ranks, None if options.all else options.sample, options.within)
            for one in chosen if options.within is None else []:
                one.peak = run(ranks, MODELS[one.model], one.predicted.strategy, MEMORY_STEPS, GIVES_BACK)[1]
            for _ in range(options.rounds):
                for one in chosen:
                    seconds, peak = run(ranks, MODELS[one.model], one.predicted.strategy, options.steps)
                    one.seconds.append(seconds)
                    one.kept.append(peak)
            rows += [one.row(empty) for one in chosen]
            for name in MODELS:
                summaries.append(summary(name, ranks, [one for one in chosen if one.model == name], empty))
                print(json.dumps(summaries[-1]), flush=True)
    every = over_all(rows)
    print(json.dumps(every), flush=True)
    report = {
        "load_average_of_the_minutes_1_5_15": [round(each, 1) for each in os.getloadavg()],
        "cores": os.cpu_count(),
        "samples": SAMPLES,
        "block_size": LENGTH,
        "models": MODELS,
        "empty_process_gib": {ranks: round(empty / GIB, 4) for ranks, empty in empties.items()},
        "machine": machine,
        "summaries": summaries,
        "over_all": every,
        "layouts": rows,
    }
    write_report(RESULTS / options.output, report, what=str(__doc__))


if __name__ == "__main__":
    main()
