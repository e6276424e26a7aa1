"""The planner's page in a browser: Python answers there, shows a choice, and says what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from harness.config.model.shape import read_model_config
from harness.planner.hardware import load_hardware
from harness.planner.page.answer import answer
from harness.planner.page.write import PYODIDE, devices, models, page
from harness.planner.search import search, task_of
from tests.support.browser import Site, needs_browser

pytestmark = needs_browser

# Chooses one address after the other, types and clicks, and keeps what the page then shows.
VISIT = """
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
async function answered(change) {
  const before = asked;
  change();
  const isAnswered = () => asked > before && document.body.dataset.answered == asked;
  for (let wait = 0; wait < 600 && !isAnswered(); wait++) await pause(100);
  const chosen = document.querySelector("#rows tr.chosen");
  return {
    message: at("message").textContent,
    verdict: at("result").hidden ? null : document.querySelector("#chosen h2").textContent,
    chosen: chosen && [...chosen.children].map((cell) => cell.textContent),
    precisions: [...at("precision").options].map((one) => one.value),
    bars: document.querySelectorAll("#chosen .bar").length,
    address: Object.fromEntries(new URLSearchParams(location.hash.slice(1))),
  };
}
const visit = (address) => answered(() => (location.hash = address));
const enter = (id, value) => answered(() => {
  at(id).value = value;
  at(id).dispatchEvent(new Event("input", { bubbles: true }));
});
const click = (row) => answered(() => document.querySelectorAll("#rows tbody tr")[row - 1].click());
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with Pyodide."""
    folder = tmp_path_factory.mktemp("site")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm, which brings Pyodide")
    command = [npm, "install", "--no-save", "--silent", "--prefix", str(folder / "npm"), f"pyodide@{PYODIDE}"]
    if subprocess.run(command, capture_output=True, timeout=300).returncode:
        pytest.skip("npm cannot bring Pyodide here")
    (folder / "pyodide").symlink_to(folder / "npm/node_modules/pyodide")
    with Site(folder) as server:
        yield server
        server.shutdown()


def in_browser(site: Site, script: str) -> Any:
    """What a script returns that runs in the page; it may wait."""
    (site.folder / "page.html").write_text(page_with(script, "/found"), encoding="utf-8")
    return json.loads(site.posted_by("page.html"))


def page_with(script: str, address: str) -> str:
    """A page with a script in it, whose result is posted to an address."""
    task = task_of(read_model_config("llama-1b"), "llama-1b", load_hardware("h100"), world_size=8, sequence=2048)
    html = page("llama-1b", "h100", task, search(task))
    body = f"const found = await (async () => {{ {VISIT} {script} }})(); "
    body += f"await fetch('{address}', {{ method: 'POST', mode: 'no-cors', body: JSON.stringify(found) }});"
    run = f"<script>window.onload = async () => {{ {body} }};</script>"
    return html.replace("</body>", run + "</body>")


def test_the_page_shows_a_choice_and_its_address_holds_it(site: Site) -> None:
    config = {"model_type": "gpt2", "n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 50257}
    pasted = json.dumps(config)[:-1] + ', "limit": -Infinity}'
    addresses = [
        "model=Llama 3.1 8B&gpus=8&batch=64",
        f"model=paste a config.json&config={quote(pasted)}&gpus=4&batch=64&memory_gib=24&network.gb_per_second=25",
        "model=Llama 3.1 405B&gpus=2&batch=8",
        "gpus=0",
        "model=paste a config.json&config={not json",
    ]
    script = f"const seen = []; for (const one of {json.dumps(addresses)}) seen.push(await visit(one)); return seen;"
    best, small, huge, none, broken = in_browser(site, script)
    asked = {"config": models()["Llama 3.1 8B"], "model": "Llama 3.1 8B", "hardware": devices()["h100"]}
    asked |= {"hardware_name": "h100", "gpus": "8", "batch": "64", "sequence": "2048", "precision": "bf16"}
    expected = json.loads(answer(json.dumps({**asked, "edits": {}, "rows": 40})))["chosen"]
    assert best["verdict"] == "fits" and best["message"] == ""
    assert best["chosen"][-2] == f"{expected['tokens_per_second']:,.0f}"
    assert best["bars"] == expected["layout"]["pipeline"] + 1
    assert (
        small["address"]["config"] == pasted and small["address"]["memory_gib"] == "24" and small["verdict"] == "fits"
    )
    assert huge["verdict"].startswith("does not fit: needs") and huge["message"].startswith("no layout of 2 ranks fits")
    assert none["message"].startswith('GPUs: "0" is not a whole') and none["verdict"] is None
    assert broken["message"].startswith("config.json is not JSON") and broken["verdict"] is None


def test_a_page_from_a_disk_shows_its_plan_and_says_what_needs_a_network(tmp_path: Path) -> None:
    script = """
      const shown = () => ({
        chosen: document.querySelector("#rows tr.chosen td").textContent,
        message: at("message").textContent,
        stale: at("result").classList.contains("stale"),
      });
      const seen = [shown(), (await click(3), shown())];
      at("gpus").value = "4";
      at("gpus").dispatchEvent(new Event("input", { bubbles: true }));
      while (!at("message").className) await pause(100);
      seen.push(shown());
      await answered(() => document.querySelector("#message button").click());
      seen.push(shown());
      return seen;
    """
    with Site(tmp_path) as server:
        html = page_with(script, f"{server.address}/found")
        (tmp_path / "page.html").write_text(html.replace("https://cdn.jsdelivr.net", "http://127.0.0.1:9"), "utf-8")
        first, third, offline, back = json.loads(server.posted_by("page.html", 60, from_disk=True))
        server.shutdown()
    assert (first["chosen"], third["chosen"], back["chosen"]) == ("1", "3", "1")
    assert first["message"] == third["message"] == back["message"] == "" and not back["stale"]
    assert offline["stale"] and "could not be loaded from http://127.0.0.1:9/pyodide" in offline["message"]
    assert "ds-harness plan" in offline["message"]


def test_the_form_and_the_rows_change_the_plan(site: Site) -> None:
    steps = [
        'enter("model", "Qwen3 8B")',
        'enter("gpus", "1,6")',
        "click(3)",
        'enter("memory_gib", "40")',
        'enter("hardware", "l40s")',
        'enter("model", PASTED)',
        """enter("config", '{"model_type": "gpt2"}')""",
    ]
    script = "const seen = [];" + "".join(f" seen.push(await {step});" for step in steps) + " return seen;"
    model, sixteen, third, less, other, empty, pasted = in_browser(site, script)
    assert model["address"]["model"] == "Qwen3 8B" and model["verdict"] == "fits"
    assert sixteen["address"]["gpus"] == "1,6" and sixteen["chosen"][0] == "1"
    assert third["chosen"][0] == "3" and third["address"]["row"].startswith("pp")
    assert less["address"]["memory_gib"] == "40" and "row" not in less["address"]
    assert float(less["chosen"][11]) <= 40 < float(sixteen["chosen"][11])
    assert "memory_gib" not in other["address"] and other["address"]["hardware"] == "l40s"
    assert other["precisions"] == [name for name in ("fp32", "bf16", "fp16") if name in load_hardware("l40s").flops]
    assert empty["message"].startswith("paste the content") and empty["verdict"] is None
    assert pasted["message"] == "" and pasted["verdict"] is not None
