"""The matrix of families: how its rows are read, compared and printed. No family is run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.verify.matrix import CELLS, Matrix, read_matrix, write_matrix
from harness.verify.trials.families import read_rows, run_families
from harness.verify.trials.models_command import differences, render, spell

RIGHT = dict.fromkeys(CELLS, "yes")
REFUSED = dict.fromkeys(CELLS, "refused: it looks ahead")
MIXED = {**RIGHT, "tensor": "wrong: losses are off by 1e-01", "export": "not tried: no <model> | runs"}
STORED = Matrix(transformers="5.0", families={"aa": RIGHT, "bee": REFUSED, "cc": MIXED})


@pytest.mark.parametrize(
    ("row", "line"),
    [
        pytest.param(RIGHT, "pipeline, tensor, experts, zero3, import, export", id="all holds"),
        pytest.param(
            REFUSED, "pipeline, tensor, experts, zero3, import, export refused: it looks ahead", id="one reason"
        ),
        pytest.param(
            MIXED,
            "pipeline, experts, zero3, import; tensor wrong: losses are off by 1e-01; "
            "export not tried: no <model> | runs",
            id="several reasons",
        ),
        pytest.param({}, "pipeline, tensor, experts, zero3, import, export not tried", id="an empty row"),
    ],
)
def test_a_row_is_one_line(row: dict[str, str], line: str) -> None:
    assert spell(row) == line


@pytest.mark.parametrize(
    ("rows", "everything", "lines"),
    [
        pytest.param({}, False, [], id="nothing was run"),
        pytest.param({"aa": RIGHT, "bee": REFUSED, "cc": MIXED}, True, [], id="nothing differs"),
        pytest.param({"bee": {**REFUSED, "zero3": "wrong: x"}}, False, [], id="another word for no"),
        pytest.param({"aa": {**RIGHT, "zero3": "wrong: x"}}, False, ["gone: aa zero3: yes -> wrong: x"], id="gone"),
        pytest.param(
            {"cc": {**MIXED, "tensor": "yes"}},
            False,
            ["came: cc tensor: wrong: losses are off by 1e-01 -> yes"],
            id="came",
        ),
        pytest.param(
            {"new": REFUSED},
            False,
            ["came: new is new: pipeline, tensor, experts, zero3, import, export refused: it looks ahead"],
            id="a new family",
        ),
        pytest.param(
            {"aa": RIGHT, "cc": MIXED},
            True,
            ["removed: transformers no longer has bee"],
            id="a family of before, if all ran",
        ),
    ],
)
def test_what_came_and_went(rows: dict[str, dict[str, str]], everything: bool, lines: list[str]) -> None:
    assert differences(STORED, rows, everything=everything) == lines


def test_the_text_has_a_line_for_each_family_and_each_reason_once() -> None:
    lines = render(STORED, "text").splitlines()
    assert lines[0].split() == list(CELLS)
    assert [line.split()[0] for line in lines[1:7]] == ["aa", "bee", "it", "cc", "losses", "no"]
    assert lines[1].split()[1:] == ["yes"] * 6 and lines[2].split()[1:] == ["refused"] * 6
    assert lines[-1] == "transformers 5.0, 3 families: pipeline 2, tensor 1, experts 2, zero3 2, import 2, export 1"


def test_the_page_escapes_what_would_break_its_table() -> None:
    page = render(STORED, "markdown")
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert rows["all"] == "| all | **2** | **1** | **2** | **2** | **2** | **1** | |"
    assert rows["cc"].endswith(
        "| yes | wrong | yes | yes | yes | not tried | losses are off by 1e-01; no &lt;model> \\| runs |"
    )


def test_a_matrix_without_families_is_a_table_without_rows() -> None:
    empty = Matrix(transformers="5.0", families={})
    assert render(empty, "text").endswith("0 families: pipeline 0, tensor 0, experts 0, zero3 0, import 0, export 0")
    assert json.loads(render(empty, "json")) == {"transformers": "5.0", "families": {}}


def test_what_is_stored_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    odd = Matrix(transformers='5.0"\\', families={"z": RIGHT, "ü": {"plan": "0" * 8, **MIXED}})
    write_matrix(odd, path)
    assert read_matrix(path) == odd
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.strip()[:4] for line in lines[3:5]] == ['"z":', '"\\u0']  # a family is a line, for the sake of diffs


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--compare"], 2, "--compare, --write and --results need --run"),
        (["--write"], 2, "--compare, --write and --results need --run"),
        (["--results", "rows"], 2, "--compare, --write and --results need --run"),
        (["llama", "of_tomorrow"], 1, "of_tomorrow: not in the matrix of transformers"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["models", *words]) == code
    except SystemExit as end:
        assert end.code == code
    captured = capsys.readouterr()
    assert said in captured.err and len(captured.err.splitlines()) == 1 and not captured.out


def test_the_stored_matrix_is_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "families: pipeline" in capsys.readouterr().out


def test_the_stored_matrix_is_printed_for_the_families_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "qwen2", "llama", "--format", "json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["families"]) == ["qwen2", "llama"]


def test_a_cell_that_is_run_alone_stands_beside_the_stored_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "rows.jsonl"
    results.write_text('{"family": "llama", "experts": "refused: why"}\n')
    words = ["models", "llama", "--run", "--only", "experts", "--results", str(results), "--format", "json"]
    assert main(words) == 0
    row = json.loads(capsys.readouterr().out)["families"]["llama"]
    assert row == {**read_matrix().families["llama"], "experts": "refused: why"}


ROW = json.dumps({"family": "aa", **RIGHT}) + "\n"


@pytest.mark.parametrize(
    ("text", "families"),
    [
        pytest.param("", [], id="empty"),
        pytest.param(ROW, ["aa"], id="one row"),
        pytest.param(ROW + ROW[:40], ["aa"], id="a last line that was cut off"),
        pytest.param(ROW[:40] + "\n" + ROW, ["aa"], id="an earlier one"),
        pytest.param(ROW.replace("yes", "wrong") + ROW, ["aa"], id="the later of two rows counts"),
    ],
)
def test_rows_are_read_as_far_as_they_are_whole(text: str, families: list[str], tmp_path: Path) -> None:
    results = tmp_path / "rows.jsonl"
    results.write_text(text)
    rows = read_rows(results)
    assert list(rows) == families and all(row == RIGHT for row in rows.values())
    assert read_rows(tmp_path / "missing") == {}


def test_what_was_run_before_is_reported_and_not_run_again(tmp_path: Path) -> None:
    results = tmp_path / "rows.jsonl"
    half = json.dumps({"family": "bee", **REFUSED})[:30]
    results.write_text(ROW + half)
    told: list[str] = []
    found = run_families(["aa"], results, limit_s=1.0, report=lambda family, row: told.append(f"{family} {row}"))
    assert found == {"aa": RIGHT} and told == [f"aa {RIGHT}"]
    with results.open("a") as file:  # as a rank adds the next row
        file.write(json.dumps({"family": "cc", **MIXED}) + "\n")
    assert list(read_rows(results)) == ["aa", "cc"]
