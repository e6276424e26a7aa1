"""What mkdocs adds to the documentation: the planner's page, and the Pyodide in which it runs.

`npm install --prefix scripts/site` brings Pyodide, the CPython for browsers. Without it the page loads Pyodide from the
network.
"""

from __future__ import annotations

import logging
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from harness.config.model.shape import read_model_config
from harness.planner.hardware import load_hardware
from harness.planner.page.write import page
from harness.planner.search import search, task_of

PYODIDE = Path(__file__).parent / "node_modules/pyodide"
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
LOG = logging.getLogger("mkdocs.hooks.site")
MODEL, HARDWARE = "llama-1b", "h100"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that no source of the docs is."""
    files.append(File.generated(config, "planner.html", content=_page()))
    if all((PYODIDE / name).is_file() for name in FILES):
        for name in FILES:
            files.append(File.generated(config, f"pyodide/{name}", abs_src_path=str(PYODIDE / name)))
    else:  # no warning, with which a strict build fails
        LOG.info(
            "planner.html loads Pyodide from the network. To put it beside the page: npm install --prefix scripts/site"
        )
    return files


def _page() -> str:
    """Return the planner's page, which begins with one model on 16 GPUs."""
    device = load_hardware(HARDWARE, 16)
    config = read_model_config(MODEL)
    task = task_of(config, MODEL, device, world_size=16, sequence=4096, global_batch=512)
    return page(MODEL, HARDWARE, task, search(task))
