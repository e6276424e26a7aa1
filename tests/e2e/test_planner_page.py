"""The planner's page in a browser: it finds what the planner finds, shows a choice, and says what is wrong."""

from __future__ import annotations

import json
import random
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from harness.config.model.families import require_trainable_config
from harness.config.model.shape import read_model_config
from harness.errors import UserError
from harness.planner.hardware import load_hardware
from harness.planner.page.content import data
from harness.planner.page.write import page
from harness.planner.preset import preset
from harness.planner.search import require_fit, search
from harness.planner.sensitivity import more_memory
from harness.planner.task import task_of
from tests.browser import dom_of, needs_browser

pytestmark = needs_browser

ROWS = 12  # of each case that are compared whole
SIZES = [1, 2, 3, 4, 6, 8, 12, 16]

# What the page computes for a case, as `found_by_python` does.
FIND = """
function foundInPage([config, hardware, gpus, sequence, batch, precision]) {
  try {
    const model = py.mapped(config);
    planner.require_trainable_config(model, false);
    const device = planner.device_of(DATA.get("hardware").get(hardware), hardware, gpus);
    const task = planner.task_of(model, "model", device, gpus, sequence, batch, precision);
    const found = planner.search(task);
    planner.require_fit(task, found);
    const memory = planner.more_memory(found);
    return {
      rows: found.fitting.slice(0, ROWS).map((one) => py.plain(one.row())),
      speeds: found.fitting.map((one) => one.tokens_per_second),
      too_large: found.too_large.length,
      reasons: py.plain(found.reasons),
      memory: memory && memory.gib,
      preset: py.plain(planner.preset(found.fitting[0].strategy, task.workload.precision)),
    };
  } catch (error) {
    if (!py.isUserError(error)) throw error;
    return { error: error.message };
  }
}
"""
# Chooses one address after the other, and keeps what the page then shows.
VISIT = """
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
async function enter(id, value) {
  at(id).value = value;
  at(id).dispatchEvent(new Event("input", { bubbles: true }));
  return visit();
}
async function click(row) {
  document.querySelectorAll("#rows tbody tr")[row - 1].click();
  return visit();
}
async function visit(address) {
  if (address !== undefined) location.hash = address;
  await pause(1000);
  const chosen = document.querySelector("#rows tr.chosen");
  return {
    message: at("message").textContent,
    verdict: at("result").hidden ? null : document.querySelector("#chosen h2").textContent,
    chosen: chosen && [...chosen.children].map((cell) => cell.textContent),
    numbers: [...document.querySelectorAll("#rows td:first-child")].map((cell) => cell.textContent),
    precisions: [...at("precision").options].map((one) => one.value),
    bars: document.querySelectorAll("#chosen .bar").length,
    address: Object.fromEntries(new URLSearchParams(location.hash.slice(1))),
  };
}
"""


def cases() -> list[list[Any]]:
    """Models, devices and sizes of many kinds: some that fit, some that do not, some that are refused."""
    draw, held = random.Random(7), data()
    models = [*held["models"].values(), *({"model_type": family} for family in held["families"])]
    kinds = [
        {"model_type": "made-up", "hidden_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 6},
        {"model_type": "bert", "num_hidden_layers": 2},
        {"model_type": "nothing"},
        {"text_config": {"model_type": "gemma3_text"}, "tie_word_embeddings": False},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    ]
    kinds[0]["vocab_size"] = 5001
    drawn = [
        [
            model,
            draw.choice(sorted(held["hardware"])),
            draw.choice(SIZES),
            draw.choice([128, 777, 2048, 8192]),
            draw.choice([8, 24, 48, 60]),
            draw.choice(["fp32", "bf16", "fp16"]),
        ]
        for model in (*kinds, *draw.sample(models, 21))
    ]
    deep = [[held["models"]["Llama 3.1 70B"], "h200", 32, 4096, 32, "bf16"]]
    return [*drawn, *deep, [held["models"]["Qwen3 30B-A3B"], "b200", 16, 4096, 32, "bf16"]]


def found_by_python(case: list[Any]) -> dict[str, Any]:
    config, hardware, gpus, sequence, batch, precision = case
    try:
        require_trainable_config(config, False)
        device = load_hardware(hardware, gpus)
        asked = {"world_size": gpus, "sequence": sequence, "global_batch": batch, "precision": precision}
        task = task_of(config, "model", device, **asked)
        found = search(task)
        require_fit(task, found)
    except UserError as error:
        return {"error": str(error)}
    memory = more_memory(found)
    return {
        "rows": [one.row() for one in found.fitting[:ROWS]],
        "speeds": [one.tokens_per_second for one in found.fitting],
        "too_large": len(found.too_large),
        "reasons": dict(found.reasons),
        "memory": memory and memory.gib,
        "preset": preset(found.fitting[0].strategy, task.workload.precision),
    }


def require_equal(page: Any, python: Any, where: str) -> None:
    """Numbers to 1e-9 of their size, all else exactly."""
    if isinstance(python, dict):
        assert list(page) == list(python), where
        for key in python:
            require_equal(page[key], python[key], f"{where}/{key}")
    elif isinstance(python, list):
        assert len(page) == len(python), where
        for index, (one, other) in enumerate(zip(page, python, strict=True)):
            require_equal(one, other, f"{where}/{index}")
    elif isinstance(python, (int, float)) and not isinstance(python, bool):
        assert page == pytest.approx(python, rel=1e-9, abs=0), where
    else:
        assert page == python, where


def in_browser(folder: Path, script: str) -> Any:
    """What a script returns that runs in the page; it may wait."""
    task = task_of(read_model_config("llama-1b"), "llama-1b", load_hardware("h100"), world_size=8, sequence=2048)
    html = page("llama-1b", "h100", task)
    report = "document.body.replaceChildren(); document.title = JSON.stringify(found).replaceAll('<', '\\\\u003c');"
    body = f"const found = await (async () => {{ {script} }})(); {report}"
    run = f"<script>window.onload = async () => {{ {body} }};</script>"
    path = folder / "page.html"
    path.write_text(html.replace("</body>", run + "</body>"), encoding="utf-8")
    title = dom_of(path, seconds=60).partition("<title>")[2].partition("</title>")[0]
    return json.loads(title.replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\xa0").replace("&amp;", "&"))


def test_the_page_finds_what_the_planner_finds(tmp_path: Path) -> None:
    drawn = cases()
    script = f"const ROWS = {ROWS}; {FIND} return {json.dumps(drawn)}.map(foundInPage);"
    shown = in_browser(tmp_path, script)
    python = [found_by_python(case) for case in drawn]
    for case, one, other in zip(drawn, shown, python, strict=True):
        require_equal(one, other, str(case))
    assert sum("rows" in one for one in python) > 15 and sum("error" in one for one in python) > 3


def test_the_page_shows_a_choice_and_its_address_holds_it(tmp_path: Path) -> None:
    pasted = json.dumps(
        {"model_type": "gpt2", "n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 50257, "limit": [0, -inf]}
    )
    addresses = [
        "model=Llama 3.1 8B&gpus=8&batch=64",
        f"model=paste a config.json&config={quote(pasted)}&gpus=4&batch=64&memory_gib=24&network.gb_per_second=25",
        "model=llama-1b&gpus=2&batch=8&row=pp2.tp1.dp1.ep1.zero1.micro4.full.none.1f1b",
        "model=Llama 3.1 405B&gpus=2&batch=8",
        "gpus=0",
        "batch=many",
        "memory_gib=-3",
        "model=paste a config.json&config={not json",
        "model=paste a config.json&config=[1]",
        'model=paste a config.json&config={"model_type": "nothing"}',
        'model=paste a config.json&config={"model_type": "xlm"}',
        'model=paste a config.json&config={"model_type": "x", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 9}',
    ]
    script = (
        f"{VISIT} const seen = []; for (const one of {json.dumps(addresses)}) seen.push(await visit(one)); return seen;"
    )
    best, small, row, huge, *wrong, unknown = in_browser(tmp_path, script)
    expected = found_by_python([data()["models"]["Llama 3.1 8B"], "h100", 8, 2048, 64, "bf16"])["rows"][0]
    assert best["verdict"] == "fits" and best["message"] == ""
    assert best["chosen"][-2] == f"{expected['tokens_per_second']:,.0f}"
    assert best["bars"] == expected["layout"]["pipeline"] + 1
    assert small["address"]["config"] == pasted and small["address"]["memory_gib"] == "24"
    assert row["chosen"][1:8] == ["2", "1", "1", "1", "4", "2", "yes"] and row["address"]["row"].startswith("pp2.tp1")
    assert huge["verdict"].startswith("does not fit: needs") and huge["message"].startswith("no layout of 2 ranks fits")
    starts = [
        'GPUs: "0" is no whole',
        'Global batch: "many"',
        'Memory of a GPU, GiB: "-3" is no',
        "config.json is not JSON",
    ]
    starts += ["config.json is not an object", "unknown model type 'nothing'", "model type 'xlm' cannot be trained"]
    for one, start in zip(wrong, starts, strict=True):
        assert one["message"].startswith(start) and one["verdict"] is None and "\n" not in one["message"]
    assert unknown["message"].startswith("model type 'x' is unknown") and unknown["verdict"] == "fits"


def test_the_form_and_the_rows_change_the_plan(tmp_path: Path) -> None:
    steps = [
        'enter("model", "Qwen3 8B")',
        'enter("gpus", "1,6")',
        "click(3)",
        'enter("memory_gib", "40")',
        'enter("hardware", "l40s")',
        'enter("hardware", "cpu")',
        'enter("model", PASTED)',
        """enter("config", '{"model_type": "gpt2"}')""",
    ]
    script = f"{VISIT} const seen = [await visit()];"
    script += "".join(f" seen.push(await {step});" for step in steps) + " return seen;"
    first, model, sixteen, third, less, other, cpu, empty, pasted = in_browser(tmp_path, script)
    assert first["address"]["model"] == "llama-1b" and first["numbers"][:3] == ["1", "2", "3"]
    assert model["address"]["model"] == "Qwen3 8B" and model["chosen"] != first["chosen"]
    assert sixteen["address"]["gpus"] == "1,6" and sixteen["chosen"][0] == "1"
    assert third["chosen"][0] == "3" and third["address"]["row"].startswith("pp")
    assert less["address"]["memory_gib"] == "40" and "row" not in less["address"]
    assert float(less["chosen"][10]) <= 40 < float(sixteen["chosen"][10])
    assert "memory_gib" not in other["address"] and other["address"]["hardware"] == "l40s"
    assert cpu["precisions"] == [name for name in ("fp32", "bf16", "fp16") if name in load_hardware("cpu").flops]
    assert empty["message"].startswith("paste the content") and empty["verdict"] is None
    assert pasted["message"] == "" and pasted["verdict"] is not None
