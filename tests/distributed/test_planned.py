"""What `ds-harness plan --write` writes trains as it is, and whatever the layout, to the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import Trainer, TrainingArguments
from harness.cli import main
from tests.support.ranks import run_ranks
from tests.support.training import BATCH, BLOCK, Curve, rows, steps_of

pytestmark = pytest.mark.ranks

MODEL = "tiny-llama"
PLAN = ["plan", "--model", MODEL, "--world_size", "2", "--hardware", "h100", "--precision", "fp32"]
PLAN += ["--global_batch_size", str(BATCH), "--block_size", str(BLOCK)]


def curves(files: list[str], folder: str) -> list[Curve]:
    """Loss and gradient norm of two steps with each file."""
    found = []
    for file in files:
        settings = {"learning_rate": 1e-3, "max_steps": 2, "save_steps": 0}
        arguments = TrainingArguments(deepspeed_config=file, output_dir=f"{folder}/{Path(file).stem}", **settings)
        trainer = Trainer(MODEL, arguments, train_dataset=rows())
        found.append(steps_of(trainer, 2))
        trainer.close()
    return found


@pytest.mark.thorough
def test_what_is_written_trains_to_the_same_numbers_in_every_layout(tmp_path: Path, capsys) -> None:
    assert main([*PLAN, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    kinds = [(tuple(row["layout"].values()), row["zero_stage"], row["offload"], row["schedule"]) for row in planned]
    wanted = [
        kinds[0],
        ((2, 1, 1), 0, "none", "zero-bubble"),
        ((1, 2, 1), 0, "none", "1f1b"),
        ((1, 1, 2), 3, "optimizer", "1f1b"),
    ]
    files = [str(tmp_path / f"plan-{number}.json") for number in range(len(wanted))]
    for kind, file in zip(wanted, files, strict=True):
        assert main([*PLAN, "--row", str(kinds.index(kind) + 1), "--write", file]) == 0
    for found in run_ranks(2, curves, files, str(tmp_path)):
        for curve in found[1:]:
            assert curve == [pytest.approx(step, rel=1e-5) for step in found[0]]
