"""Writes the planner's page: one HTML file that computes plans in a browser, without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

from harness.config.model.shape import read_model_config
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.hardware import read_device
from harness.planner.page.content import PARTS, data, program, without_sources
from harness.planner.task import Task


def write_page(path: Path, model: str, hardware: str, task: Task) -> None:
    """Write the page, which begins with a task and what the user calls its model and its device.

    UserError where it cannot be written.
    """
    text = page(model, hardware, task)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--page {path}: cannot be written: {(error.strerror or '').lower()}") from None


def page(model: str, hardware: str, task: Task) -> str:
    """Return the page."""
    held = data()
    folder = Path(model)
    model_name, device_name = folder.resolve().name if folder.exists() else model, Path(hardware).stem.lower()
    held["models"][model_name] = _finite(read_model_config(model))
    held["hardware"][device_name] = without_sources(read_device(hardware)[0])
    held["start"] = {
        "model": model_name,
        "gpus": str(task.world_size),
        "hardware": device_name,
        "batch": str(task.global_batch),
        "sequence": str(task.workload.sequence),
        "precision": task.workload.precision,
    }
    first, *others = tables((PARTS / "predictions.md").read_text("utf-8"))
    content = {
        "style": (PARTS / "page.css").read_text("utf-8"),
        "first_table": first,
        "other_tables": "\n".join(others),
        "data": json.dumps(held, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "runtime": (PARTS / "runtime.js").read_text("utf-8"),
        "program": program(),
        "drawing": (PARTS / "draw.js").read_text("utf-8"),
        "script": (PARTS / "page.js").read_text("utf-8"),
    }
    before, *pieces = (PARTS / "page.html").read_text("utf-8").split("{{")
    named = (piece.partition("}}") for piece in pieces)
    return before + "".join(content[name] + rest for name, _, rest in named)


def _finite(config: JsonObject) -> JsonObject:
    """Return a config.json without the Infinity and NaN that browsers refuse in JSON; no size of a model is one."""
    content: JsonObject = json.loads(json.dumps(config), parse_constant=lambda _: None)
    return content


def tables(markdown: str) -> Iterator[str]:
    """Yield the tables of a text as HTML."""
    for block in markdown.strip().split("\n\n"):
        if not block.startswith("|"):
            yield f"<p>{escape(block)}</p>"
            continue
        head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
        names = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        rows = "".join(f"<tr>{line}</tr>" for line in lines)
        yield f'<div class="wide"><table><tr>{names}</tr>{rows}</table></div>'
