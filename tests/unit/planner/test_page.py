"""The planner's page asks the planner itself, whose sources it carries whole."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from math import inf
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.planner.hardware import device_of, load_hardware
from harness.planner.model_config import text_decoder
from harness.planner.page.answer import answer
from harness.planner.page.write import PARTS, PYODIDE, devices, models, page, planner_zip
from harness.planner.preset import preset
from harness.planner.search import search, task_of

ROOT = Path(__file__).resolve().parents[3]
PARAMETERS = {"Llama 3.1 8B": 8.03e9, "Llama 3.1 70B": 70.55e9, "Llama 3.1 405B": 405.85e9, "Qwen3 8B": 8.19e9}
PARAMETERS |= {"Qwen3 32B": 32.76e9, "Qwen3 30B-A3B": 30.53e9, "Mixtral 8x7B": 46.7e9, "DeepSeek V3": 671e9}
PARAMETERS |= {"GPT-2 XL": 1.5576e9}
ASKED = ["--model", "llama-1b", "--world_size", "16", "--hardware", "h100"]


def question(**changes: Any) -> dict[str, Any]:
    """What the page asks for an 8B model on 8 H100."""
    asked = {"config": models()["Llama 3.1 8B"], "model": "Llama 3.1 8B", "hardware": devices()["h100"]}
    asked |= {"hardware_name": "h100", "gpus": "8", "batch": "64", "sequence": "2048", "precision": "bf16"}
    return {**asked, "edits": {}, "row": "", "rows": 40, **changes}


def asked(**changes: Any) -> dict[str, Any]:
    return json.loads(answer(json.dumps(question(**changes))))


def test_the_answer_is_what_the_planner_finds() -> None:
    task = task_of(
        models()["Llama 3.1 8B"], "x", load_hardware("h100"), world_size=8, sequence=2048, global_batch=64,
        precision="bf16",
    )  # fmt: skip
    found, shown = search(task), asked(rows=3)
    kept = [{key: row[key] for key in found.fitting[0].row()} for row in shown["rows"][:3]]
    assert kept == json.loads(json.dumps([one.row() for one in found.fitting[:3]]))
    assert (shown["tried"], shown["fit"], shown["message"]) == (found.tried, len(found.fitting), "")
    assert shown["chosen"]["number"] == 1 and shown["chosen"]["verdict"] == "fits"
    assert shown["chosen"]["preset"] == preset(found.fitting[0].strategy, "bf16")
    assert len(asked(rows=0)["rows"]) >= len(found.fitting)


def test_a_chosen_row_is_shown_wherever_it_stands() -> None:
    last = asked(rows=0)["rows"][30]
    shown = asked(rows=2, row=last["name"])
    assert shown["chosen"]["name"] == last["name"] and shown["rows"][-1]["name"] == last["name"]
    assert asked(row="pp9")["chosen"]["number"] == 1


def test_what_fits_nowhere_is_shown_with_the_reason() -> None:
    huge = asked(config=models()["Llama 3.1 405B"], gpus="2", batch="8")
    assert huge["is_error"] and huge["message"].startswith("no layout of 2 ranks fits")
    assert huge["chosen"]["verdict"].startswith("does not fit: needs") and huge["chosen"]["number"] == 0


def test_changes_of_the_device_count() -> None:
    less = asked(edits={"memory_gib": "40"})
    assert less["chosen"]["memory_gib"]["max"] <= 40
    slow = asked(edits={"node.gb_per_second": "1"})
    assert slow["chosen"]["tokens_per_second"] < asked()["chosen"]["tokens_per_second"]


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"gpus": "0"}, 'GPUs: "0" is not a whole'),
        ({"batch": "many"}, 'Global batch: "many"'),
        ({"sequence": "9" * 40}, "Sequence length:"),
        ({"edits": {"memory_gib": "-3"}}, 'Memory of a GPU, GiB: "-3" is no'),
        ({"edits": {"memory_gib": "nan"}}, 'Memory of a GPU, GiB: "nan" is no'),
        ({"config": " "}, "paste the content"),
        ({"config": "{not json"}, "config.json is not JSON"),
        ({"config": "[1]"}, "config.json is not an object"),
        ({"config": '{"model_type": "nothing"}'}, "unknown model type 'nothing', and its config.json gives no"),
        ({"config": '{"model_type": "xlm"}'}, "model type 'xlm' cannot be trained"),
    ],
)
def test_what_the_user_must_correct_is_one_line(changes: dict[str, Any], start: str) -> None:
    found = asked(**changes)
    assert set(found) == {"error"} and found["error"].startswith(start) and "\n" not in found["error"]


def test_an_unknown_family_is_planned_from_its_sizes_and_said() -> None:
    config = '{"model_type": "x", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 9, "limit": [0, -Infinity]}'
    found = asked(config=config, gpus="1,6")
    assert found["message"].startswith("model type 'x' is unknown") and found["fit"] > 0
    config = '{"model_type": "opt", "hidden_size": 64, "num_attention_heads": 4, "word_embed_proj_dim": 32}'
    assert asked(config=config)["message"].startswith("the number of parameters is a guess")


def test_the_page_carries_all_that_its_python_needs(tmp_path: Path) -> None:
    """Without site-packages and some of the standard library, as in the browser."""
    zipfile.ZipFile(io.BytesIO(planner_zip())).extractall(tmp_path)
    asked_here = question(config=models()["Qwen3 30B-A3B"], model="Qwen3 30B-A3B")
    code = "import sys; sys.path.insert(0, sys.argv[1]); sys.modules.update(dict.fromkeys(sys.argv[2:]))\n"
    code += "from harness.planner.page.answer import answer\n"
    code += "print(answer(sys.stdin.read()))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(tmp_path), "resource", "termios", "syslog", "curses"],
        input=json.dumps(asked_here), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == json.loads(answer(json.dumps(asked_here)))
    assert any(row["expert_parallel_size"] > 1 for row in json.loads(done.stdout)["rows"])


def test_the_page_is_the_same_each_time_and_has_its_tables(tmp_path: Path) -> None:
    made = tmp_path / "planner.html"
    assert main(["plan", *ASKED, "--page", str(made)]) == 0
    first = made.read_text("utf-8")
    assert main(["plan", *ASKED, "--page", str(made)]) == 0
    assert made.read_text("utf-8") == first
    assert first.count("<td>all</td>") == 1  # the table of what the predictions are worth


def test_the_page_has_the_tables_of_the_docs() -> None:
    tables = (PARTS / "predictions.md").read_text("utf-8")
    page = (ROOT / "docs/predictions.md").read_text("utf-8")
    shown = [page.partition(f"<!-- {name} -->\n")[2].partition("<!-- end of")[0] for name in ("sources", "tables")]
    assert all(shown) and "".join(shown).lstrip() == tables


def test_the_site_has_the_pyodide_that_the_page_asks_for() -> None:
    wanted = json.loads((ROOT / "scripts/site/package.json").read_text("utf-8"))["dependencies"]["pyodide"]
    assert wanted == PYODIDE


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ASKED, "--page", str(tmp_path / "no" / "page.html")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_well_known_models_have_the_parameters_that_are_published() -> None:
    known = json.loads((PARTS / "models.json").read_text("utf-8"))
    assert set(known) == set(PARAMETERS)
    for name, config in known.items():
        assert text_decoder(config, name).parameters == pytest.approx(PARAMETERS[name], rel=2e-3), name


def test_a_custom_device_and_model_are_on_its_page(tmp_path: Path) -> None:
    content = json.loads((ROOT / "harness/planner/hardware/h100.json").read_text("utf-8"))
    content["memory_gib"]["value"], content["name"] = 61.5, "My GPU"
    (tmp_path / "mine.json").write_text(json.dumps(content))
    device = device_of(content, "mine")
    config = {"model_type": "mamba", "hidden_size": 64, "num_heads": 2, "num_layers": 2, "vocab_size": 9, "limit": inf}
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = task_of(config, "mine", device, world_size=4, sequence=512)
    html = page(str(tmp_path), str(tmp_path / "mine.json"), task, search(task))
    assert '"name":"My GPU","memory_gib":61.5' in html and '"vocab_size":9,"limit":null}' in html
    assert f'"start":{{"model":"{tmp_path.name}","gpus":"4","hardware":"mine"' in html
