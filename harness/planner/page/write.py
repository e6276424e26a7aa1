"""Write the planner's page: one HTML file in which the planner itself runs, in Pyodide, without a server.

The page contains the plan of the task with which it is written, and shows that from a disk and without a network. For
other choices it contains the planner's Python as a zip, and loads Pyodide, CPython for browsers, from `pyodide/` beside
the page if a server has that, as for the project's documentation, and otherwise from Pyodide's own address.
"""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

from harness.atomic import write_output
from harness.config.model.plans import declares_expert_plan, families_of_matrix
from harness.config.model.shape import PRESETS, read_model_config
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.hardware import FOLDER, names, read_device
from harness.planner.model_config import families
from harness.planner.page.answer import EXPERT_FAMILIES, FITTING, LABELS, note_on, shown
from harness.planner.search import Found, Task

PACKAGE = Path(__file__).resolve().parents[2]
PARTS = Path(__file__).parent / "parts"
PYODIDE = "314.0.7"  # the same version as in scripts/site/package.json
SOURCES = (
    "checking",
    "config",
    "optimizers",
    "planner",
    "topology",
    "parallel/pipeline",
    "schedules",
    "atomic.py",
    "errors.py",
    "records.py",
    "spelling.py",
    "wording.py",
)
"""Folders and files of `harness` that the planner imports."""


def write_page(path: Path, model: str, hardware: str, task: Task, found: Found) -> None:
    """Write the page, its form filled with a task and the names of its model and device, and its plan.

    Raises UserError if it cannot be written.
    """
    text = page(model, hardware, task, found)
    try:
        write_output(path, text)
    except OSError as error:
        raise UserError(f"--page {path}: cannot be written: {(error.strerror or '').lower()}") from None


def page(model: str, hardware: str, task: Task, found: Found) -> str:
    """Return the page."""
    folder = Path(model)
    model_name = folder.resolve().name if folder.exists() else model
    device_name = Path(hardware).stem.lower()
    config = _finite(read_model_config(model))
    content = {
        "models": models() | {model_name: config},
        "hardware": devices() | {device_name: without_sources(read_device(hardware)[0])},
        "labels": LABELS,
        "pyodide": PYODIDE,
        "rows": FITTING,
        "plan": shown(task, note_on(task, config), found),
        "start": {
            "model": model_name,
            "gpus": str(task.world_size),
            "hardware": device_name,
            "batch": str(task.global_batch),
            "sequence": str(task.workload.sequence),
            "precision": task.workload.precision,
        },
    }
    accuracy = (PARTS / "predictions.md").read_text("utf-8").strip().split("\n\n")
    short = next(block for block in accuracy if block.startswith("| nodes |"))
    filled = {
        "style": (PARTS / "page.css").read_text("utf-8"),
        "first_table": as_html(short),
        "other_tables": "\n".join(as_html(block) for block in accuracy if block is not short),
        "data": json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "planner": base64.b64encode(planner_zip()).decode(),
        "worker": (PARTS / "worker.js").read_text("utf-8"),
        "drawing": (PARTS / "draw.js").read_text("utf-8"),
        "script": (PARTS / "page.js").read_text("utf-8"),
    }
    before, *pieces = (PARTS / "page.html").read_text("utf-8").split("{{")
    named = (piece.partition("}}") for piece in pieces)
    return before + "".join(filled[name] + rest for name, _, rest in named)


def planner_zip() -> bytes:
    """Return the planner's Python and its data files, as the package `harness` in a zip."""
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(_sources()):
            entry = zipfile.ZipInfo(f"harness/{path.relative_to(PACKAGE)}")  # without a date: equal sources, equal page
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo("harness/__init__.py"), "")
        experts = json.dumps(expert_families())
        archive.writestr(zipfile.ZipInfo(f"harness/{EXPERT_FAMILIES.relative_to(PACKAGE)}"), experts)
    return stored.getvalue()


def _sources() -> Iterator[Path]:
    for name in SOURCES:
        if name.endswith(".py"):
            yield PACKAGE / name
        else:
            yield from (PACKAGE / name).rglob("*.py")
            yield from (PACKAGE / name).rglob("*.json")
    yield PACKAGE / "parallel/__init__.py"
    yield PACKAGE / "models/matrix.json"
    yield from (PACKAGE / "models/plans").glob("*.json")


def expert_families() -> list[str]:
    """Return the families that declare an expert-parallel plan in the installed transformers."""
    known = {*families(), *families_of_matrix()}
    return sorted(name for name in known if declares_expert_plan(name.replace("-", "_").removesuffix("_text")))


def models() -> JsonObject:
    """Return the config.json of well-known models and of the presets, by name."""
    known: JsonObject = json.loads((PARTS / "models.json").read_text("utf-8"))
    presets = {path.parent.name: json.loads(path.read_text("utf-8")) for path in sorted(PRESETS.glob("*/config.json"))}
    return known | presets


def devices() -> JsonObject:
    """Return the packaged device files by name, without their sources."""
    return {name: without_sources(json.loads((FOLDER / f"{name}.json").read_text("utf-8"))) for name in names()}


def without_sources(content: object) -> object:
    """Return a device file without its sources."""
    if not isinstance(content, dict):
        return content
    return content["value"] if "value" in content else {key: without_sources(value) for key, value in content.items()}


def _finite(config: JsonObject) -> JsonObject:
    """Return a config.json without Infinity and NaN, which browsers refuse in JSON; no size of a model is one."""
    content: JsonObject = json.loads(json.dumps(config), parse_constant=lambda _: None)
    return content


def as_html(block: str) -> str:
    """Return a table or a paragraph of a Markdown text as HTML."""
    if not block.startswith("|"):
        return f"<p>{escape(block)}</p>"
    head, _, *body = [[escape(cell.strip(" `")) for cell in line.strip("|").split("|")] for line in block.splitlines()]
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in body]
    names = "".join(f"<th>{cell}</th>" for cell in head)
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{names}</tr>{rows}</table></div>'
