"""Metrics of other programs, in the forms that they write them, against a run's own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.verify.trials.against import compare_files, read_curve
from harness.verify.trials.verify_command import verify

LOSSES = [5.0 - 0.01 * step + 0.003 * (step % 7) for step in range(1, 41)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(LOSSES, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


FORMS = {
    "hf.json": lambda steps: json.dumps({"log_history": [{"step": s, "loss": round(x, 4)} for s, x in steps]}),
    "megatron.log": lambda steps: "\n".join(
        f" iteration {s:8d}/     100 | consumed samples: {s * 8} | learning rate: 1.0E-05 | lm loss: {x:.6E} | x"
        for s, x in steps
    ),
    "titan.log": lambda steps: "\n".join(f"[rank0]: step: {s:2}  loss: {x:8.5f}  grad_norm: 1.1" for s, x in steps),
    "coloured.log": lambda steps: "\n".join(f"\x1b[31mstep: {s:2}  \x1b[32mloss: {x:8.5f}\x1b[39m" for s, x in steps),
    "wandb.csv": lambda steps: (
        '"Step","mine - train/loss","mine - train/loss__MIN"\n' + "\n".join(f'"{s}","{x}","0"' for s, x in steps)
    ),
    "german.csv": lambda steps: "Step;val_loss; Loss\n" + "\n".join(f"{s};9; {x}" for s, x in steps),
    "nested.jsonl": lambda steps: "\n".join(
        json.dumps({"global_step": s, "eval_loss": None, "metrics": {"loss": x}}) for s, x in steps
    ),
    "table.csv": lambda steps: "step,train_loss\n" + "\n".join(f"{s},{x}" for s, x in steps),
    "lines.jsonl": lambda steps: "\n".join(json.dumps({"iteration": s, "lm loss": x}) for s, x in steps),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_program_with_the_same_losses_is_equal_but_for_its_digits(run: Path, name: str) -> None:
    said, same = compare_files(run, written(run, name, FORMS[name](list(enumerate(LOSSES, 1)))))
    assert same and "40 steps compared" in said and "equal up to rounding" in said


@pytest.mark.parametrize("name", FORMS)
def test_the_step_is_named_from_which_on_they_differ(run: Path, name: str) -> None:
    theirs = [(s, x if s < 23 else x + 0.002) for s, x in enumerate(LOSSES, 1)]
    said, same = compare_files(run, written(run, name, FORMS[name](theirs)))
    assert not same and "the losses diverge at step 23:" in said


def test_steps_from_zero_and_means_over_several_steps_are_seen(run: Path) -> None:
    from_zero = written(run, "zero.jsonl", FORMS["lines.jsonl"](list(enumerate(LOSSES))))
    said, same = compare_files(run, from_zero)
    assert same and "its step 0 is 1" in said
    means = [(step, sum(LOSSES[step - 5 : step]) / 5) for step in range(5, 41, 5)]
    said, same = compare_files(run, written(run, "means.json", FORMS["hf.json"](means)))
    assert same and "means of 5 steps" in said


def test_steps_may_be_missing_and_the_mean_of_a_whole_run_is_none_of_them(run: Path) -> None:
    some = [(step, loss) for step, loss in enumerate(LOSSES, 1) if step % 7 in (1, 4, 5)]
    said, same = compare_files(run, written(run, "gaps.csv", FORMS["table.csv"](some)))
    assert same and f"{len(some)} steps compared" in said
    history = [*({"step": s, "loss": x} for s, x in some), {"step": 40, "train_loss": 4.0, "train_runtime": 3.0}]
    assert compare_files(run, written(run, "trainer_state.json", json.dumps({"log_history": history})))[1]


def test_a_loss_that_is_no_number_parts(run: Path) -> None:
    theirs = [(s, x if s != 30 else float("nan")) for s, x in enumerate(LOSSES, 1)]
    for name in ("lines.jsonl", "table.csv", "titan.log"):
        said, same = compare_files(run, written(run, name, FORMS[name](theirs)))
        assert not same and "the losses diverge at step 30:" in said


def test_what_bf16_rounds_away_counts_in_bf16_alone(run: Path) -> None:
    theirs = written(run, "b.jsonl", FORMS["lines.jsonl"]([(s, x * 1.0003) for s, x in enumerate(LOSSES, 1)]))
    assert not compare_files(run, theirs)[1]
    (run / "run.json").write_text(json.dumps({"config": {"bf16": {"enabled": True}}}))
    assert compare_files(run, theirs)[1]


def test_a_file_without_losses_and_missing_arguments_are_one_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="there are no steps with a loss"):
        read_curve(written(run, "empty.log", "nothing"))
    for words in (["--against", "x"], [str(run)], ["--model_name_or_path", "tiny-llama"]):
        with pytest.raises(SystemExit) as end:
            verify(words)
        assert end.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("text", ["5", "[]", '{"config": 5}', '{"config": {"bf16": 5}}', "null", "[" * 9999])
def test_a_run_json_of_another_kind_says_nothing_of_the_precision(run: Path, text: str) -> None:
    (run / "run.json").write_text(text)
    text, _ = compare_files(run, run / "metrics.jsonl")
    assert "fp32" in text


def test_what_is_not_a_file_of_losses_is_one_line_and_never_waited_for(run: Path) -> None:
    os.mkfifo(run / "pipe.jsonl")
    (run / "deep.jsonl").write_text('{"a":' * 9999)
    for name, why in (
        ("pipe.jsonl", "is a pipe"),
        ("/dev/zero", "is a device"),
        ("deep.jsonl", "no steps with a loss"),
    ):
        with pytest.raises(UserError, match=why):
            read_curve(run / name)
