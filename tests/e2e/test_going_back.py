"""`--nonfinite rollback` in one process: back to a checkpoint, without the batch, to the bit; and when it gives up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import UserError
from harness.checkpoint.directories import read_progress
from tests.support.rollback import rows, train, trainer, without_the_batch


def test_the_run_goes_on_as_if_the_batch_had_never_been(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    back, never = tmp_path / "back", tmp_path / "never"
    assert train(str(back)) == ""
    said = capsys.readouterr().out
    without_the_batch(str(never))
    assert rows(back) == rows(never)
    assert [row[0] for row in rows(back)] == list(range(1, 8)) and rows(back)[4][4] == 24
    assert said.count("back to") == 1 and "step 5: the loss is nan" in said
    assert "checkpoint-3, step 3; samples 16 to 19 of the training order are skipped" in said
    assert (back / "model.safetensors").exists() is False  # only the script exports


def test_a_run_that_resumes_leaves_the_batch_out_as_well(tmp_path: Path) -> None:
    first, whole = str(tmp_path / "first"), str(tmp_path / "whole")
    assert train(whole) == ""
    ours = trainer(first)
    ours.args.save_total_limit = 1
    ours.state.max_steps = 4  # it is interrupted before the bad batch
    ours.train()
    ours.close()
    assert read_progress(Path(first) / "checkpoint-4").skipped_samples == []
    again = trainer(first, resume_from_checkpoint="auto")
    again.state.max_steps = 6
    again.train()
    again.close()
    assert read_progress(Path(first) / "checkpoint-6").skipped_samples == [[16, 20]]
    last = trainer(first, resume_from_checkpoint="auto")
    assert last.state.skipped_samples == [[16, 20]]
    last.train()
    last.close()
    assert rows(first) == rows(whole)


def test_before_the_first_checkpoint_it_goes_back_to_the_beginning(tmp_path: Path) -> None:
    assert train(str(tmp_path), save_steps=0) == ""
    assert (tmp_path / "checkpoint-0").is_dir()
    assert len(rows(tmp_path)) == 7 and all(row[1] is not None for row in rows(tmp_path))


def test_it_gives_up_where_nothing_helps(tmp_path: Path) -> None:
    message = train(str(tmp_path), bad=set(range(16, 64)))
    assert "step 5: the loss is nan" in message and "after 3 rollbacks that did not help" in message
    assert [row[0] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert read_progress(tmp_path / "checkpoint-3").step == 3


@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_weights_that_are_not_finite_are_neither_saved_nor_exported(policy: str, tmp_path: Path) -> None:
    ours = trainer(str(tmp_path), bad=set(), nonfinite=policy, learning_rate=1e38, lr_scheduler_type="constant")
    ours.train()
    with pytest.raises(UserError, match="is not written"):
        ours.save_model()
    ours.close()
    assert not list(tmp_path.glob("checkpoint-*")) and not list(tmp_path.glob("*.safetensors"))


def test_a_weight_that_is_not_finite_leads_back_too(tmp_path: Path) -> None:
    ours = trainer(str(tmp_path), bad=set())
    step = ours.training_step

    def spoiling() -> object:
        record = step()
        if ours.state.global_step == 6 and not ours.state.skipped_samples:
            next(ours.run.module.parameters()).data[0] = float("inf")
        return record

    ours.training_step = spoiling  # type: ignore[method-assign,assignment]
    ours.train()
    ours.close()
    assert ours.state.skipped_samples == [[20, 24]]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 7
