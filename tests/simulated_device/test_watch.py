"""A rank that leaves one call out is named, though all ranks wait for their devices at the end of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import Trainer, TrainerCallback
from harness.deepspeed.schedule import Transfers
from tests.support.ranks import words_of_failing_ranks
from tests.support.training import Job, arguments_of, rows, tiny_model

pytestmark = pytest.mark.ranks

STEP = 3


class LeaveOut(TrainerCallback):
    """From the third step on a device hangs as NCCL's does; one rank leaves out its next call of a kind."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from tests.support.simulated_device import process_group, works

        if state.global_step + 1 != STEP:
            return
        works.PATIENCE_S = 1.0
        if kwargs["trainer"].run.groups.rank != self.rank:
            return
        if self.kind != "send":
            process_group.LEAVE_OUT.append(self.kind)
            return
        send = Transfers.send

        def leave_out(*_: Any) -> None:
            Transfers.send = send

        Transfers.send = leave_out


def train(model: str, folder: str, layout: str, kind: str, rank: int) -> None:
    job = Job(model, layout)
    arguments = arguments_of(job, f"{folder}/{layout}", hang_seconds=3, max_steps=5)
    trainer = Trainer(model, arguments, train_dataset=rows() * 5, callbacks=[LeaveOut(kind, rank)])
    trainer.train()


CASES = {
    ("pp2z1", "send", 0): "has sent",
    ("tp2z1", "all_reduce", 1): "collectives of the group of ranks 0-1, rank 0",
    ("dp2z3", "all_gather", 1): "collectives of the group of ranks 0-1, rank 0",
}


@pytest.mark.parametrize(
    ("layout", "kind", "rank"),
    [pytest.param(*case, marks=() if case[0] == "pp2z1" else pytest.mark.thorough, id=case[0]) for case in CASES],
)
def test_the_rank_that_leaves_a_call_out_is_named(layout: str, kind: str, rank: int, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "llama", "llama", False)
    words = words_of_failing_ranks(2, train, model, str(tmp_path), layout, kind, rank)
    lines = [line for line in words.splitlines() if line.startswith("error:")]
    assert any(f"rank {rank} (stage" in line and CASES[layout, kind, rank] in line for line in lines), words
