"""The verb `ds-harness models`: how rows are printed, compared, stored, and read back from an interrupted run."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from harness.cli import main
from harness.compat.cells import stored_difference
from harness.compat.commands import differences, render, spell
from harness.compat.launch import read_rows
from harness.verify.matrix import CELLS, Matrix, read_matrix

GOOD = dict.fromkeys(CELLS, "yes")
ROWS = {"good": GOOD, "half": {**GOOD, "tensor": "refused: no plan | at all"}}
MATRIX = Matrix(transformers="5.0", families=ROWS)


def test_the_stored_matrix_is_printed_in_every_form(capsys):
    assert main(["models"]) == 0
    assert "families: pipeline" in capsys.readouterr().out
    assert main(["models", "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["transformers"] == read_matrix().transformers


def test_a_row_says_what_holds_and_why_the_rest_does_not():
    assert spell(ROWS["half"]) == "pipeline, experts, zero3, import, export; tensor refused: no plan | at all"
    assert "half  yes       refused   yes" in render(MATRIX, "text")
    assert "| half | yes | refused | yes | yes | yes | yes | no plan \\| at all |" in render(MATRIX, "markdown")
    assert "| all | **2** | **1** |" in render(MATRIX, "markdown")


def test_what_came_and_went_is_told():
    rows = {"half": GOOD, "new": {**GOOD, "export": "wrong: other logits"}}
    assert differences(MATRIX, rows, everything=True) == [
        "came: half tensor: refused: no plan | at all -> yes",
        "came: new is new: pipeline, tensor, experts, zero3, import; export wrong: other logits",
        "removed: transformers no longer has good",
    ]
    assert differences(MATRIX, {"good": {**GOOD, "zero3": "refused: x"}}, everything=False) == [
        "gone: good zero3: yes -> refused: x"
    ]


def test_rows_of_an_interrupted_run_are_read_but_for_the_one_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == {}
    path.write_text(json.dumps({"family": "good", **GOOD}) + '\n{"family": "ha')
    assert read_rows(path) == {"good": GOOD}


@pytest.mark.parametrize(
    ("argv", "text"),
    [(["models", "nothing-of-the-kind"], "not in the matrix")],
)
def test_a_misuse_is_one_line(argv, text, capsys):
    assert main(argv) == 1
    assert text in capsys.readouterr().err


def test_directories_are_compared_to_the_bit(tmp_path):
    wanted = {"a": torch.ones(2), "b": torch.zeros(3)}
    cases = {
        "same": (wanted, None),
        "less": ({"a": torch.ones(2)}, "b is missing (1 in all)"),
        "more": ({**wanted, "c": torch.ones(1)}, "c is unexpected (1 in all)"),
        "other": ({**wanted, "a": torch.ones(2).nextafter(torch.zeros(2))}, "a has other values"),
        "half": ({**wanted, "a": torch.ones(2).half()}, "a is torch.float16 (2,) instead of torch.float32 (2,)"),
    }
    for name, (tensors, _) in cases.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    for name, (_, difference) in cases.items():
        assert stored_difference(tmp_path / "same", tmp_path / name) == difference
