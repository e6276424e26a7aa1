"""Peak memory of a training step with a vocabulary of 131,072: the harness's loss beside torch's cross entropy.

    python scripts/bench/loss_memory.py

A Llama of two narrow layers, 1,024 tokens a step: the logits alone are 0.5 GiB in float32. Torch's cross entropy is
given as a loss of the user's own, so that all else is the same. Each run is a process of its own, whose resident memory
is read every few milliseconds. Prints the peaks and ratios, and writes results/loss_memory.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from report import RESULTS, write_report

VOCABULARY, TOKENS, STEPS = 131_072, 1_024, 2
GIB = 1 << 30


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def one_run(name: str, precision: str) -> dict[str, Any]:
    """Train some steps; return their losses, and what the steps add to the memory of the prepared run at most."""
    import torch
    from torch.nn import functional
    from transformers import LlamaConfig

    from harness import Trainer, TrainingArguments

    def of_torch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=TOKENS, tie_word_embeddings=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(VOCABULARY, (TOKENS,), generator=generator)} for _ in range(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=1, save_steps=0, logging_steps=1,
            bf16=precision == "bf16",
        )  # fmt: skip
        trainer = Trainer(config, args, train_dataset=data, loss_fn=of_torch if name == "torch" else None)
        before, peak, done = resident(), [0], threading.Event()

        def watch() -> None:
            while not done.is_set():
                peak[0] = max(peak[0], resident())
                time.sleep(0.002)

        watcher = threading.Thread(target=watch)
        watcher.start()
        losses = [trainer.training_step().loss for _ in range(STEPS)]
        done.set()
        watcher.join()
    return {"losses": losses, "process_gib": peak[0] / GIB, "step_gib": (peak[0] - before) / GIB}


def main() -> None:
    """Run all, compare, report."""
    if len(sys.argv) == 3:
        print(json.dumps(one_run(*sys.argv[1:])))
        return
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        runs: dict[str, Any] = {}
        for name in ("torch", "harness"):
            done = subprocess.run([sys.executable, __file__, name, precision], stdout=subprocess.PIPE, check=True)
            runs[name] = json.loads(done.stdout.splitlines()[-1])
        ratios = {key: runs["harness"][key] / runs["torch"][key] for key in ("process_gib", "step_gib")}
        differences = [abs(a - b) for a, b in zip(runs["harness"]["losses"], runs["torch"]["losses"], strict=True)]
        found[precision] = {**runs, "ratio": ratios, "largest_difference_of_loss": max(differences)}
    print(json.dumps(found, indent=2))
    write_report(RESULTS / "loss_memory.json", found, what=str(__doc__))


if __name__ == "__main__":
    main()
