"""Layers move between stages while a run lives, and no number changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import Trainer
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Job, arguments_of, rows, tiny_model

pytestmark = pytest.mark.ranks

# all layers but the last on the first stage: as uneven as two stages can be
UNEVEN = {"pipeline": {"stages": 2, "partition": "type:Epilogue", "activation_checkpoint_interval": 1}}
STEPS = 5


def train(job: Job, folder: str, rebalance: int | None) -> dict[str, object]:
    """Train, and save at step 4; return the losses, where the stages began and end, and what was printed."""
    said: list[str] = []
    arguments = arguments_of(
        job,
        f"{folder}/{job.layout}-{rebalance}",
        max_steps=STEPS,
        save_steps=4,
        rebalance_steps=rebalance,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
    )
    trainer = Trainer(job.model, arguments, rows(masked=True))
    before = trainer.run.boundaries
    console = trainer.run.console
    object.__setattr__(console, "say", said.append)
    trainer.train()
    after = trainer.run.boundaries
    trainer.close()
    lines = (Path(arguments.output_dir) / "metrics.jsonl").read_text().splitlines()
    described = json.loads((Path(arguments.output_dir) / "run.json").read_text())["stage_boundaries"]
    losses = [(json.loads(line)["loss"], json.loads(line)["learning_rate"]) for line in lines]
    return {"losses": losses, "before": before, "after": after, "said": said, "described": described}


def both(jobs: list[Job], folder: str) -> list[tuple[dict[str, object], dict[str, object]]]:
    return [(train(job, folder, None), train(job, folder, 2)) for job in jobs]


@pytest.mark.parametrize(("ranks", "layouts"), [(2, ["pp2z1", "pp2z0"]), (4, ["pp2tp2z0", "pp2dp2z1"])])
def test_layers_move_to_the_stage_with_less_to_do_and_no_number_changes(tmp_path, ranks, layouts) -> None:
    model = tiny_model(tmp_path / "m", "llama", True, num_hidden_layers=4, intermediate_size=256)
    schedules = {"pp2tp2z0": "zero-bubble", "pp2dp2z1": "1f1b-async", "pp2z0": "interleaved"}
    jobs = [Job(model, at, {"pipeline": {**UNEVEN["pipeline"], "schedule": schedules.get(at)}}) for at in layouts]
    for plain, moved in run_ranks(ranks, both, jobs, str(tmp_path))[0]:
        assert plain["before"] == plain["after"] == moved["before"]
        assert moved["described"] == moved["after"]
        assert [rate for _, rate in moved["losses"]] == [rate for _, rate in plain["losses"]]
        assert [loss for loss, _ in moved["losses"]] == pytest.approx([loss for loss, _ in plain["losses"]], rel=1e-6)
        assert any("and should take" in line for line in moved["said"])  # they may go back, where time tells nothing
