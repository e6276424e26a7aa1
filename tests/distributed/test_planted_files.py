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
from harness.checkpoint import state
from harness.errors import UserError
from tests.distributed.ranks import run_ranks
from tests.distributed.training import rows

STAGES = (0, 1, 2, 3)


class Command:
    """Runs `touch MARKER` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def saved(value: Any) -> bytes:
    """The file that torch makes of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def plant_everywhere(folder: str, stage: int) -> list[tuple[str, bool, str]]:
    """Train a step, then plant a command in each file of the checkpoint in turn, as torch and as pickle writes it.

    Returns for each (file, whether the command ran, what was said).
    """
    output_dir, marker = Path(folder, f"z{stage}"), Path(folder, f"ran-{stage}")
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    args = TrainingArguments(deepspeed_config=config, output_dir=str(output_dir), max_steps=1)
    trainer = Trainer("tiny-llama", args, train_dataset=rows())
    trainer.train()
    checkpoint = output_dir / "checkpoint-1"
    state.load(trainer.engine.deepspeed, checkpoint)
    found = []
    for path in sorted(checkpoint.rglob("*.pt")):
        sound = path.read_bytes()
        for planted in (saved(Command(marker)), pickle.dumps(Command(marker))):
            path.write_bytes(planted)
            try:
                state.load(trainer.engine.deepspeed, checkpoint)
                said = ""
            except UserError as error:
                said = str(error)
            found.append((path.name, marker.exists(), said))
        path.write_bytes(sound)
    state.load(trainer.engine.deepspeed, checkpoint)  # whole again
    trainer.close()
    return found


def plant_in_all_stages(folder: str) -> list[list[tuple[str, bool, str]]]:
    return [plant_everywhere(folder, stage) for stage in STAGES]


@pytest.mark.ranks
def test_a_planted_command_does_not_run_and_its_file_is_named(tmp_path: Path) -> None:
    for stage, found in zip(
        STAGES, run_ranks(1, plant_in_all_stages, str(tmp_path), process_group=False)[0], strict=True
    ):
        assert len({name for name, _, _ in found}) >= 2, f"ZeRO-{stage} saves model and random state at least"
        for name, ran, said in found:
            assert not ran, f"ZeRO-{stage}: a command in {name} was run"
            assert name in said and "it could run code" in said, f"ZeRO-{stage}, {name}: {said}"
