"""What a run says, and refuses, before its first step."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import TrainingArguments
from harness.arguments.themes.script import ScriptArguments
from harness.checking import resolve
from harness.config import AutoValues
from harness.console import Console
from harness.preflight import TRIAL_STEPS, limit_trial
from harness.topology.layout import Layout
from harness.train import main
from harness.training.callbacks import TrainerState
from harness.training.engine.nonfinite import NonFinite
from harness.training.prepare.stages import report_stages
from harness.training.saving.checkpoints import Checkpoints

ROOT = Path(__file__).resolve().parents[3]


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
    report_stages(
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


def test_a_run_that_saves_the_model_alone_promises_no_resume() -> None:
    def said_of(saved: int | None, *, model_only: bool) -> str:
        out = io.StringIO()
        console = Console(out=out, error=out, speaks=True)
        args, state = TrainingArguments(save_only_model=model_only), TrainerState(global_step=7)
        spec = SimpleNamespace(args=args)
        run = SimpleNamespace(spec=spec, state=state, console=console)
        checkpoints = Checkpoints(run, NonFinite("stop", console), lambda *_: None)  # type: ignore[arg-type]
        checkpoints.newest = saved
        checkpoints.stopped(15)
        return out.getvalue()

    assert "saved and stopped after step 7; resume_from_checkpoint" in said_of(7, model_only=False)
    assert "the model of step 7 is saved, but no run can continue from it" in said_of(7, model_only=True)
    assert "resume" not in said_of(7, model_only=True) + said_of(None, model_only=True)


PROGRAM = """{before}
from harness import TrainingArguments, UserError
try:
    TrainingArguments(max_steps="many")
except UserError:
    print("caught")
{error}
"""


@pytest.mark.parametrize(
    ("before", "error", "ends"),
    [
        ("", "TrainingArguments(max_steps=0)", r"error: --max_steps 0: .* \(.*program.py:7\)\n"),
        ("import sys; sys.excepthook = lambda *_: print('mine')", "TrainingArguments(max_steps=0)", ""),
        ("", "1 / 0", r"Traceback .*ZeroDivisionError: division by zero\n"),
    ],
)
def test_an_error_of_the_user_ends_a_program_with_one_line(before: str, error: str, ends: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(before=before, error=error))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (1, "caught\n" + "mine\n" * ("mine" in before))
    assert re.fullmatch(ends, done.stderr, re.DOTALL), done.stderr
