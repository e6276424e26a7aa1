"""The planner's page is current in the docs, and its translation of Python refuses what it does not know."""

from __future__ import annotations

import ast
import json
from math import inf
from pathlib import Path

import pytest

from harness.cli import main
from harness.planner.hardware import device_of
from harness.planner.model_config import text_decoder
from harness.planner.page.content import PARTS, program
from harness.planner.page.expressions import Reference, Untranslatable
from harness.planner.page.statements import Statements
from harness.planner.page.write import page
from harness.planner.task import task_of

ROOT = Path(__file__).resolve().parents[3]
DOCS_PAGE = ROOT / "docs/planner.html"
ASKED = ["--model", "llama-1b", "--world_size", "16", "--hardware", "h100"]
ASKED += ["--global_batch_size", "512", "--block_size", "4096"]
COMMAND = f"ds-harness plan {' '.join(ASKED)} --page docs/planner.html"
PARAMETERS = {"Llama 3.1 8B": 8.03e9, "Llama 3.1 70B": 70.55e9, "Llama 3.1 405B": 405.85e9, "Qwen3 8B": 8.19e9}
PARAMETERS |= {"Qwen3 32B": 32.76e9, "Qwen3 30B-A3B": 30.53e9, "Mixtral 8x7B": 46.7e9, "DeepSeek V3": 671e9}
PARAMETERS |= {"GPT-2 XL": 1.5576e9}


def test_the_page_of_the_docs_is_current(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "planner.html"
    assert main(["plan", *ASKED, "--page", str(made)]) == 0
    assert made.read_text("utf-8") == DOCS_PAGE.read_text("utf-8"), f"write it again: {COMMAND}"
    assert made.read_text("utf-8").count("<td>all</td>") == 1  # the table of what the predictions are worth


def test_the_page_has_the_tables_of_the_docs() -> None:
    tables = (PARTS / "predictions.md").read_text("utf-8")
    assert (ROOT / "docs/predictions.md").read_text("utf-8").endswith(f"<!-- tables -->\n\n{tables}")


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ASKED, "--page", str(tmp_path / "no" / "page.html")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_well_known_models_have_the_parameters_that_are_published() -> None:
    known = json.loads((PARTS / "models.json").read_text("utf-8"))
    assert set(known) == set(PARAMETERS)
    for name, config in known.items():
        assert text_decoder(config, name).parameters == pytest.approx(PARAMETERS[name], rel=2e-3), name


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    a = 1\nexcept ValueError:\n    a = 2",
        "with a as b:\n    pass",
        "while a:\n    a = 0",
        "return [1] + b",
        "return a @ b",
        "return f'{a:>8}'",
        "return a() < b() < c()",
        "return unknown(1)",
        "return lambda a=1: a",
        "return Seconds(1.0, 2.0, third=3.0)",
        "return Seconds(1.0)",
        "return add(1, c=2)",
        "return ~a",
        "del a",
    ],
)
def test_python_outside_of_the_subset_is_refused(code: str) -> None:
    with pytest.raises(Untranslatable, match="line"):
        translated(code)


def test_python_of_the_subset_keeps_its_meaning() -> None:
    assert "py.floorDivide(a, b)" in translated("return a // b")
    assert "if (py.truthy(a))" in translated("if a:\n    return 1")
    assert "py.or(a, () => b)" in translated("return a or b")
    assert "add(1, undefined, 3)" in translated("return add(1, d=3)")
    assert "new Seconds({ forward: 1.0, backward: 2.0 })" in translated("return Seconds(1.0, 2.0)")


def translated(code: str) -> str:
    """A function's body in JavaScript, where `Seconds` and `add` are known."""
    lines = "\n".join(f"    {line}" for line in code.split("\n"))
    seconds, add, function = ast.parse(
        "class Seconds:\n    forward: float\n    backward: float\n"
        "def add(a, b=2, d=4): pass\n"
        f"def function(a, b, c):\n{lines}"
    ).body
    assert isinstance(seconds, ast.ClassDef) and isinstance(add, ast.FunctionDef)
    known = {"Seconds": Reference(javascript="Seconds", node=seconds), "add": Reference(javascript="add", node=add)}

    def lookup(name: str, node: ast.AST) -> Reference:
        if name not in known:
            raise Untranslatable(node, name)
        return known[name]

    return Statements(lookup, set()).function(function, "function")


def test_the_program_has_no_reader_of_files() -> None:
    text = program()
    assert "read_text" not in text and "Path(" not in text and "const planner = {" in text


def test_a_custom_device_and_model_are_on_its_page(tmp_path: Path) -> None:
    content = json.loads((ROOT / "harness/planner/hardware/h100.json").read_text("utf-8"))
    content["memory_gib"]["value"], content["name"] = 61.5, "My GPU"
    (tmp_path / "mine.json").write_text(json.dumps(content))
    device = device_of(content, "mine")
    config = {"model_type": "mamba", "hidden_size": 64, "num_heads": 2, "num_layers": 2, "vocab_size": 9, "limit": inf}
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = task_of(config, "mine", device, world_size=4, sequence=512)
    html = page(str(tmp_path), str(tmp_path / "mine.json"), task)
    assert '"name":"My GPU","memory_gib":61.5' in html and '"vocab_size":9,"limit":null}' in html
    assert f'"start":{{"model":"{tmp_path.name}","gpus":"4","hardware":"mine"' in html
