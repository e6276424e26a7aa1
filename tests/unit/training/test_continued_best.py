"""The best evaluation and early stopping of a run that was stopped, or goes on elsewhere."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from harness import TrainerCallback
from harness.resilience.process import signals
from tests.support.points import POINTS, Make, finish

pytest.importorskip("harness.extras", reason="best models and early stopping are a part")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    while not signals.received():
        time.sleep(0.001)


@pytest.mark.parametrize("within", [False, True])
def test_an_evaluation_that_a_signal_left_out_is_made_up_for(within: bool, make: Make, tmp_path: Path) -> None:
    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and not within:
                kill()

    class Points(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if within and stopped.state.global_step == 2 and not signals.received():
                kill()
            return super().__getitem__(index)

    kept = {"eval_steps": 2, "max_steps": 4, "load_best_model_at_end": True}
    whole = make(name="whole", **kept)
    finish(whole)
    stopped = make(Kill(), **kept)
    stopped.run.set_evaluation(Points(POINTS), is_new=False)
    with pytest.raises(SystemExit):
        stopped.train()
    stopped.close()
    resumed = make(resume_from_checkpoint="auto", **kept)
    finish(resumed)
    rows = [
        [json.loads(line) for line in (tmp_path / name / "evaluations.jsonl").read_text().splitlines()]
        for name in ("whole", "run")
    ]
    told = [[(row["step"], row["eval_loss"]) for row in each] for each in rows]
    assert told[0] == told[1] and [step for step, _ in told[0]] == [2, 4]
    assert resumed.state.best_metric == whole.state.best_metric


def test_a_run_that_has_stopped_early_trains_no_further(make: Make) -> None:
    kept = {"max_steps": 9, "eval_steps": 2, "learning_rate": 0.0, "early_stopping_patience": 1}
    assert finish(make(**kept)) == 4
    assert finish(make(resume_from_checkpoint="auto", **kept)) == 4
    assert finish(make(resume_from_checkpoint="auto", **{**kept, "early_stopping_patience": 2})) == 6


def test_the_best_checkpoint_stays_however_the_path_of_the_resumed_one_is_spelled(make: Make, tmp_path: Path) -> None:
    kept = {
        "eval_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "greater_is_better": True,  # so the first evaluation stays the best
        "metric_for_best_model": "loss",
    }
    finish(make(max_steps=4, **kept))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    then = make(max_steps=8, resume_from_checkpoint=str(tmp_path / "link/checkpoint-4"), **kept)
    finish(then)
    assert then.state.best_model_checkpoint == str(tmp_path / "run/checkpoint-2")
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-8"}
