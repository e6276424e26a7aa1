"""What is read of a run's folder, and what its curves, marks and figures are made of: from small files made by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.planner.hardware import load_hardware
from harness.report import run_charts as module
from harness.report.charts import RUNS, of_run
from harness.report.page import diagnostics, differences, facts
from harness.report.run_charts import curves, marks_of, step_charts, thinned
from harness.report.run_files import RunFiles, predict_run, read_run, read_runs

Rows = Sequence[Mapping[str, Any]]


def run(steps: Rows = (), name: str = "run", **more: Any) -> RunFiles:
    return RunFiles(
        name=name, folder=Path(name), about=more.pop("about", {}), steps=[dict(row) for row in steps], **more
    )


def write(folder: Path, text: str, about: object = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    if about is not None:
        (folder / "run.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        pytest.param('{"step": 1}\n{"step": 2}\n', [1, 2], id="whole lines"),
        pytest.param('{"step": 1}\n{"step": 2', [1], id="a last line that is half written"),
        pytest.param('\n\n{"step": 1}\n', [1], id="blank lines"),
        pytest.param('{"step": "1"}\n{"loss": 1}\n[1]\nnull\n{"step": 3}\n', [3], id="lines of something else"),
        pytest.param('{"step": 2}\n{"step": 1}\n', [2, 1], id="in the order of the file"),
        pytest.param('{"step": 1, "loss": NaN}\n', [1], id="a loss that is no number"),
    ],
)
def test_lines_with_a_step_are_read(text: str, steps: list[int], tmp_path: Path) -> None:
    assert [row["step"] for row in read_run(write(tmp_path, text), "x").steps] == steps


@pytest.mark.parametrize("about", [[], "run", None, {}, {"config": [], "layout": 5}])
def test_a_run_json_of_something_else_is_as_none(about: object, tmp_path: Path) -> None:
    found = read_run(write(tmp_path, '{"step": 1}\n', about), "x")
    assert found.config == {} and found.layout == {} and found.shown_profile is None
    assert facts(found)[0].value == "1" and curves([found]) == []


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"parameters": ' + "9" * 400 + "}", "a number has 400 digits"),
        ('{"a": ', "Expecting value"),
        (None, "it is a pipe"),
    ],
    ids=["deep", "a huge number", "cut off", "a pipe"],
)
def test_a_run_json_that_cannot_be_read_is_told(about: str | None, words: str, tmp_path: Path) -> None:
    steps = ['{"step": 1}', '{"step": ' + "[" * 100_000, '{"step": 2, "loss": ' + "1" * 400 + "}", '{"step": 3}']
    folder = write(tmp_path, "\n".join(steps) + "\n")
    (folder / "run.json").write_text(about) if about else os.mkfifo(folder / "run.json")
    found = read_run(folder, "x")
    assert found.problem is not None and str(folder / "run.json") in found.problem and words in found.problem
    assert found.about == {} and [row["step"] for row in found.steps] == [1, 3]


@pytest.mark.parametrize("value", [None, [], "x", -1, 1.5, True, float("inf"), 2**90, {"a": 1}])
def test_values_of_another_kind_break_no_chart(value: object, tmp_path: Path) -> None:
    model = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sound = {"config": {"train_batch_size": 8}, "model": model, "arguments": {"block_size": 64}}
    for about in (
        {"stages": value},
        {"layout": {"world_size": value}},
        {"arguments": value},
        {"parameters": value},
        {"expected": value},
    ):
        found = read_run(write(tmp_path, '{"step": 1}\n', {**sound, **about}), "x")
        predict_run(found, load_hardware("cpu", 2))  # whatever it says: it raises nothing
        assert facts(found) and step_charts(found) == []


def test_bytes_that_are_no_text_hide_their_line_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": \xff}\n{"step": 3}\n')
    assert [row["step"] for row in read_run(tmp_path, "x").steps] == [1, 3]


def test_checkpoints_are_found_by_their_numbers(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-x", "checkpoint-", "other-3"):
        (tmp_path / name).mkdir()
    assert sorted(read_run(write(tmp_path, '{"step": 1}'), "x").checkpoints) == [9, 10]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [write(tmp_path / one, '{"step": 1}') for one in ("a/run", "b/run", "other")]
    assert [one.name for one in read_runs(folders)] == ["a/run", "b/run", "other"]
    with pytest.raises(UserError, match="is given twice"):
        read_runs([folders[0], folders[0] / ".." / "run"])


def test_a_curve_is_drawn_where_there_is_a_value() -> None:
    rows = [{"step": 1, "loss": 2, "grad_norm": None}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": "x"}]
    (loss,) = curves([run(rows)])
    (line,) = loss.lines
    assert (loss.key, line.name, line.x, line.y) == ("loss", "training", (1, 2, 3), (2.0, None, None))
    assert curves([run([{"step": 1, "loss": True}, {"step": 2, "loss": float("inf")}])]) == []


def test_runs_have_their_names_and_colours_in_every_curve() -> None:
    rows = [{"step": 1, "loss": 2.0}]
    first = run(rows, "first", evaluations=[{"step": 1, "eval_loss": 3.0}])
    (chart,) = curves([first, run(rows, "second"), run((), "empty")])
    assert [(line.name, line.is_points, line.color) for line in chart.lines] == [
        ("first", False, RUNS[0]),
        ("first, evaluation", True, RUNS[0]),
        ("second", False, RUNS[1]),
    ]
    assert of_run(len(RUNS)) == of_run(0)


def test_what_happened_is_marked_at_its_step() -> None:
    found = run(
        [{"step": step, "consumed_samples": samples} for step, samples in ((1, 4), (2, 8), (3, 20), (9, 60))],
        about={"config": {"train_batch_size": 4}},
        restarts=[{"step": 2, "cause": "rank 1 died"}, {"step": 8}],
        checkpoints=[6, 2],
    )
    assert [(mark.x, mark.kind, mark.text) for mark in marks_of(found)] == [
        (2, "checkpoint", "checkpoint at step 2"),
        (2, "restart", "restart after a failure in step 2: rank 1 died"),
        (3, "rollback", "rollback: 8 samples are left out before step 3"),
        (6, "checkpoint", "checkpoint at step 6"),
        (8, "restart", "restart after a failure in step 8: None"),
    ]
    assert marks_of(found, with_name=True)[0].text == "checkpoint at step 2 (run)"


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        pytest.param(4, [4, 8, 12], id="nothing is left out"),
        pytest.param(4, [4, 8, 8], id="the run went back"),
        pytest.param(None, [4, 8, 99], id="the batch is not known"),
        pytest.param("auto", [4, 8, 99], id="or is no number"),
        pytest.param(4, [4, None, 99], id="samples were not counted"),
    ],
)
def test_no_rollback_is_made_up(batch: object, samples: list[int | None]) -> None:
    rows = [{"step": step, "consumed_samples": count} for step, count in enumerate(samples, start=1)]
    assert marks_of(run(rows, about={"config": {"train_batch_size": batch}})) == []


@settings(max_examples=25)
@given(st.lists(st.none() | st.floats(-1e9, 1e9), min_size=41, max_size=90))
def test_a_thinned_curve_shows_its_extremes_and_gaps(values: list[float | None]) -> None:
    points = list(enumerate(values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_POINTS", 40)
        kept = thinned(points)
    assert set(kept) <= set(points) and [x for x, _ in kept] == sorted({x for x, _ in kept})
    numbers = [value for value in values if value is not None]
    shown = [value for _, value in kept if value is not None]
    if numbers:
        assert (min(shown), max(shown)) == (min(numbers), max(numbers))
    assert (None in values) == any(value is None for _, value in kept)


@pytest.mark.parametrize(
    ("layout", "value", "note"),
    [
        ({"pipeline": 1, "data": 1, "tensor": 1, "world_size": 1}, "one rank", "1 rank"),
        ({"pipeline": 2, "data": 1, "tensor": 4, "world_size": 8}, "pp2 × tp4", "8 ranks"),
        ({"data": 3, "world_size": 3}, "dp3", "3 ranks"),
    ],
)
def test_a_layout_is_said_by_the_axes_that_cut(layout: dict[str, int], value: str, note: str) -> None:
    (fact,) = facts(run(about={"layout": layout}))
    assert (fact.value, fact.label, fact.note) == (value, "layout", note)


def test_figures_are_the_last_loss_and_medians() -> None:
    rows = [{"step": step, "tokens_per_second": 10.0**step, "step_seconds": step} for step in (1, 2, 4)]
    rows[0]["tokens_per_second"] = None
    found = facts(run([*rows, {"step": 1000, "loss": 1.23456}], about={"parameters": 1_234_567}))
    assert [(fact.label, fact.value) for fact in found] == [
        ("steps", "1,000"),
        ("last loss", "1.2346"),
        ("tokens/s", "5,050"),
        ("seconds a step", "2"),
        ("parameters", "1.2 M"),
    ]


def test_settings_that_differ_are_shown_beside_each_other() -> None:
    one = {"config": {"fp16": {}, "bf16": {"enabled": True}}, "arguments": {"seed": 1, "output_dir": "a"}}
    other = {"config": {"fp16": {}, "train_batch_size": 8}, "arguments": {"seed": 1.0, "output_dir": "b"}}
    assert differences([run(about=one), run(about=other)]) == [
        ("/arguments/seed", ["1", "1.0"]),
        ("/config/bf16/enabled", ["true", "null"]),
        ("/config/train_batch_size", ["null", "8"]),
    ]
    assert differences([run(about=one), run(about=one)]) == []


def test_the_check_of_the_config_counts_the_runs_ranks() -> None:
    config = {"train_batch_size": 7, "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}}
    found = diagnostics(run(about={"config": config, "layout": {"world_size": 2}}))
    assert [(severity, code) for severity, code, _ in found] == [("error", "DS302"), ("warning", "DS503")]
    assert found[1][2] == (
        "/zero_optimization/stage3_max_live_parameters: stage3_max_live_parameters has an effect at ZeRO stage 3 only, "
        "but the stage is 2 (remove it, or change the stage)"
    )
    assert diagnostics(run()) == []
