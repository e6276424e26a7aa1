"""What a checkpoint costs: beside the steps of training, to write, to verify and to load.

One rank with one thread; the thread that writes has a core of its own. Steps with and without a save beside them take
turns, so that a drift of the machine hits both alike. Writing and reading are compared with a plain loop over a file of
the same size, in the same run, with nothing in the page cache.

    OMP_NUM_THREADS=1 taskset -c 0,1 python scripts/bench/saving.py [--large]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import RESULTS, write_report
from transformers import LlamaConfig

from harness import Trainer, TrainingArguments
from harness.checkpoint.directories import read_manifest
from harness.checkpoint.integrity import changed_file

BLOCK_BYTES = 16 << 20
SMALL = LlamaConfig(
    vocab_size=8000,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
LARGE = LlamaConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=26,
    num_attention_heads=16,
    num_key_value_heads=16,
    tie_word_embeddings=False,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "saving", help="on the disk")
    parser.add_argument("--large", action="store_true", help="400 M parameters, and the speeds alone")
    parser.add_argument("--steps", type=int, default=20, help="steps with one save, and without")
    parser.add_argument("--rounds", type=int, default=1, help="of steps with and without")
    flags = parser.parse_args()
    shutil.rmtree(flags.folder, ignore_errors=True)
    trainer = begin(flags.folder / "run", LARGE if flags.large else SMALL, rows=1 if flags.large else 4)
    steps(trainer, 1, save=True)  # allocates the memory for the copy
    beside = {} if flags.large else costs(trainer, flags.steps, flags.rounds)
    checkpoint = trainer.save_checkpoint()
    parameters = trainer.run.trainable.size()
    report = {
        "cores": len(os.sched_getaffinity(0)),
        "parameters": parameters,
        **beside,
        "bytes_a_parameter": round(size_of(checkpoint) / parameters, 3),
        **speeds(trainer, checkpoint),
    }
    trainer.close()
    shutil.rmtree(flags.folder)
    write_report(RESULTS / ("saving-400m.json" if flags.large else "saving.json"), report, what=__doc__)
    print(json.dumps(report, indent=2))


def costs(trainer: Trainer, count: int, rounds: int) -> dict[str, Any]:
    """Return what a save costs the steps beside which it is written."""
    pairs, blocked = [], []
    for _ in range(rounds):
        alone, _ = steps(trainer, count)
        beside, waited = steps(trainer, count, save=True)
        pairs.append((alone, beside))
        blocked.append(waited)
    step = statistics.median(alone for alone, _ in pairs)
    return {
        "steps_with_one_save": count,
        "step_s": round(step, 3),
        "step_with_save_over_step": [round(beside / alone, 3) for alone, beside in pairs],
        "blocked_s": [round(seconds, 3) for seconds in blocked],
        "blocked_share_of_a_step": round(statistics.median(blocked) / step, 3),
    }


def begin(folder: Path, model: LlamaConfig, rows: int) -> Trainer:
    """Return a Trainer of the model that has made its first steps, of micro-batches of `rows` samples."""
    arguments = TrainingArguments(
        deepspeed_config={"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}},
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2,
        max_steps=10_000,
        save_steps=0,
        save_total_limit=1,
    )
    samples = [{"input_ids": [(7 * row + at) % 8000 for at in range(128)]} for row in range(64)]
    trainer = Trainer(model, arguments, train_dataset=samples)
    for _ in range(3):
        trainer.training_step()
    return trainer


def steps(trainer: Trainer, count: int, *, save: bool = False) -> tuple[float, float]:
    """Make steps as the training loop does, with a save that begins after the first and is whole after the last.

    Returns the mean seconds of a step, and those for which the save kept training waiting.
    """
    start, waited = time.perf_counter(), 0.0
    for number in range(count):
        trainer.training_step()
        if save and number == 0:
            waited = timed(trainer.checkpoints.begin)
        else:
            trainer.checkpoints.wait_a_moment()
            if trainer.checkpoints.is_ready:
                trainer.checkpoints.advance()
    trainer.checkpoints.finish()
    return (time.perf_counter() - start) / count, waited


def speeds(trainer: Trainer, checkpoint: Path) -> dict[str, Any]:
    """Return MB/s of writing, reading and verifying a checkpoint, and of a plain loop.

    A file is written and removed before each that is timed: the host of a virtual machine gives it memory for the page
    cache more slowly than many a disk writes.
    """
    size, plain = size_of(checkpoint), checkpoint.parent / "plain"
    state = trainer.run.engine_state
    seconds: dict[str, list[float]] = {}
    for _ in range(3):
        write_plain(plain, size)
        seconds.setdefault("write_plain", []).append(timed(lambda: write_plain(plain, size)))
        trainer.training_step()
        write_plain(plain, size)
        plain.unlink()
        seconds.setdefault("write", []).append(timed(trainer.save_checkpoint))
        write_plain(plain, size)
        newest = trainer.run.spec.output_dir / f"checkpoint-{trainer.state.global_step}"
        drop_from_cache(plain)
        seconds.setdefault("read_plain", []).append(timed(lambda: read_plain(plain)))
        for file in newest.iterdir():
            drop_from_cache(file)
        seconds.setdefault("load", []).append(timed(lambda path=newest: state.load(path)))
        for file in newest.iterdir():
            drop_from_cache(file)
        seconds.setdefault("verify", []).append(timed(lambda path=newest: changed_file(path, 0, 1)))
        seconds.setdefault("verify_in_cache", []).append(timed(lambda path=newest: changed_file(path, 0, 1)))
    return {f"{name}_mb_per_s": round(size / 1e6 / statistics.median(each)) for name, each in seconds.items()}


def size_of(checkpoint: Path) -> int:
    return sum(size for size, _ in read_manifest(checkpoint).files.values())


def write_plain(path: Path, size: int) -> None:
    """Write a file in large blocks, and wait for the disk."""
    block = os.urandom(BLOCK_BYTES)
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-size // BLOCK_BYTES)):
            file.write(block)
        os.fsync(file.fileno())


def read_plain(path: Path) -> None:
    into = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(into):
            pass


def drop_from_cache(path: Path) -> None:
    """Have the system forget a file that is on the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
