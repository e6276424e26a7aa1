"""A checkpoint into which somebody has put code is refused, and the code does not run, whichever file it is in."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Trainer, TrainingArguments
from harness.checkpoint import training_state
from harness.checkpoint.directories import MANIFEST, contents, write_manifest
from tests.support.ranks import run_ranks
from tests.support.training import rows
from tests.support.workers import refusal_of

READ = {"model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "state.json", MANIFEST}
"""The files that a resumed run reads; the others are for HuggingFace."""


class Command:
    """Runs `touch MARKER` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def plant_everywhere(folder: str) -> list[tuple[str, bool, str, str]]:
    """Train a step, then plant a command in each file of the checkpoint in turn, as torch and as pickle writes it.

    Returns for each (file, whether the command ran, what verifying the checkpoint said, what loading it said though the
    manifest was changed to agree).
    """
    output_dir, marker = Path(folder, "run"), Path(folder, "ran")
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    args = TrainingArguments(deepspeed_config=config, output_dir=str(output_dir), max_steps=1)
    trainer = Trainer("tiny-llama", args, train_dataset=rows())
    trainer.train()
    checkpoint, state = output_dir / "checkpoint-1", trainer.run.engine_state
    state.load(checkpoint)
    listed = (checkpoint / MANIFEST).read_bytes()
    by_torch = io.BytesIO()
    torch.save(Command(marker), by_torch)
    found = []
    for path in sorted(checkpoint.rglob("*")):
        sound = path.read_bytes()
        for planted in (by_torch.getvalue(), pickle.dumps(Command(marker))):
            path.write_bytes(planted)
            verified = refusal_of(lambda: training_state.first_unchanged(checkpoint, output_dir, auto=False))
            if path.name != MANIFEST:
                write_manifest(checkpoint, 1, contents(checkpoint))
            loaded = refusal_of(lambda: state.load(checkpoint))
            found.append((path.name, marker.exists(), verified, loaded))
        path.write_bytes(sound)
        (checkpoint / MANIFEST).write_bytes(listed)
    state.load(checkpoint)  # whole again
    trainer.close()
    return found


@pytest.mark.ranks
def test_a_planted_command_does_not_run_and_its_file_is_named(tmp_path: Path) -> None:
    (found,) = run_ranks(1, plant_everywhere, str(tmp_path), process_group=False)
    assert {name for name, *_ in found} >= {*READ, "config.json"}
    for name, ran, verified, loaded in found:
        assert not ran, f"a command in {name} was run"
        assert name in verified, f"{name}: {verified}"
        if name in READ - {MANIFEST}:
            assert name in loaded and "cannot be read" in loaded, f"{name}: {loaded}"
