"""What a run says, and refuses, before its first step."""

from __future__ import annotations

import io
from typing import Any

import pytest

from harness import TrainingArguments
from harness.config import AutoValues, resolve
from harness.topology.layout import Layout
from harness.train import main
from harness.training.arguments.themes.script import ScriptArguments
from harness.training.console import Console
from harness.training.prepare import startup_report
from harness.training.prepare.preflight import TRIAL_STEPS, limit_trial


@pytest.mark.parametrize("argv", [[], ["--local_rank=0"]])
def test_no_arguments_are_answered_with_a_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "--deepspeed_config" in told and "--max_steps" in told


@pytest.mark.parametrize("given", [{"max_steps": 5}, {"num_train_epochs": 3.0}])
def test_only_a_run_without_data_and_steps_is_a_trial(given: dict[str, Any]) -> None:
    args = TrainingArguments()
    assert "trial" in (limit_trial(ScriptArguments(), args) or "")
    assert args.max_steps == TRIAL_STEPS
    asked = TrainingArguments(**given)
    assert limit_trial(ScriptArguments(), asked) is None
    assert asked.max_steps == given.get("max_steps", -1)
    assert limit_trial(ScriptArguments(train_file="my.txt"), TrainingArguments()) is None


def said(stages: int, accumulation: int) -> str:
    """What the start of a run says of its layout and batch."""
    values = AutoValues(world_size=stages, pipeline_parallel_size=stages, gradient_accumulation_steps=accumulation)
    out = io.StringIO()
    layout = Layout.from_world(stages, pp_size=stages, tp_size=1)
    startup_report.stages(
        Console(out=out, error=out, speaks=True),
        layout,
        resolve({"train_micro_batch_size_per_gpu": "auto"}, values),
        1,
        [],
    )
    return out.getvalue()


@pytest.mark.parametrize(
    ("stages", "accumulation", "says"),
    [
        (1, 1, None),
        (2, 1, "2 stages with 1 micro-batch are idle for 50% of a step: --gradient_accumulation_steps 4 leaves 20%"),
        (2, 3, "2 stages with 3 micro-batches are idle for 25% of a step"),
        (2, 4, None),
        (4, 11, "--gradient_accumulation_steps 12 leaves 20%"),
        (4, 12, None),
    ],
)
def test_a_pipeline_that_idles_for_more_than_a_fifth_says_what_to_set(
    stages: int, accumulation: int, says: str | None
) -> None:
    text = said(stages, accumulation)
    assert ("warning" in text) == (says is not None)
    assert says is None or says in text
