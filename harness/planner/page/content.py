"""What the page holds: the planner's program, and the files that its functions read, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from harness.config.model.families import LAYOUTS, REFUSED
from harness.config.model.plans import MODELS, declares_expert_plan, families_of_matrix, plan_file
from harness.config.model.shape import PRESETS
from harness.config.values.json_object import JsonObject
from harness.planner.hardware import FOLDER, names
from harness.planner.model_config import families
from harness.planner.page.program import Program

PARTS = Path(__file__).parent / "parts"
EXPORTED = (
    "harness.config.model.families.require_trainable_config",
    "harness.planner.hardware.device_of",
    "harness.planner.preset.preset",
    "harness.planner.search.require_fit",
    "harness.planner.search.search",
    "harness.planner.sensitivity.more_devices",
    "harness.planner.sensitivity.more_memory",
    "harness.planner.task.LARGEST",
    "harness.planner.task.task_of",
)
METHODS = ("row", "fits", "has_room", "peak_bytes", "host_bytes", "limit_bytes", "parameters", "tried")
# Functions that read files, and what stands for them in the page.
REPLACED = {
    "harness.planner.model_config.families": "() => DATA.get('families')",
    "harness.config.model.plans.families_of_matrix": "() => DATA.get('matrix')",
    "harness.config.model.plans.plan_file": "(family) => py.on.get(DATA.get('plans'), family)",
    "harness.config.model.plans.declares_expert_plan": "(family) => DATA.get('expert_plans').includes(family)",
    # no stages by class name in a search
    "harness.parallel.pipeline.partition.by_type": "() => { throw py.UserError('no partition by type here'); }",
}


def program() -> str:
    """Return the planner in JavaScript. It expects `py` of runtime.js, and `DATA`."""
    return Program(REPLACED).text(EXPORTED, METHODS)


def data() -> JsonObject:
    """Return what the program reads, and the devices and models to choose from."""
    matrix, plans = families_of_matrix(), (path.stem for path in sorted((MODELS / "plans").glob("*.json")))
    return {
        "families": families(),
        "matrix": {family: dict(_facts(row)) for family, row in matrix.items()},
        "plans": {family: _refusals(family) for family in plans},
        "expert_plans": [name for name in sorted(_folders()) if declares_expert_plan(name)],
        "hardware": {
            name: without_sources(json.loads((FOLDER / f"{name}.json").read_text("utf-8"))) for name in names()
        },
        "models": _models(),
    }


def _facts(row: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what the planner asks of a row of the matrix of families."""
    for key, value in row.items():
        if key == "plan" or (key in LAYOUTS and value.startswith(REFUSED)):
            yield key, "yes" if key == "plan" else value
        if key == "is_decoder":
            yield key, value


def _refusals(family: str) -> JsonObject:
    cases = (plan_file(family) or {}).get("cases", [])
    return {"cases": [{"if": case["if"], "refuse": case["refuse"]} for case in cases if "refuse" in case]}


def _folders() -> set[str]:
    """Return the names of families as folders of transformers have them."""
    return {name.replace("-", "_").removesuffix("_text") for name in (*families(), *families_of_matrix())}


def without_sources(content: object) -> object:
    """Return a device file without its sources."""
    if not isinstance(content, dict):
        return content
    return content["value"] if "value" in content else {key: without_sources(value) for key, value in content.items()}


def _models() -> JsonObject:
    """Return the config.json of well-known models and of the presets, by name."""
    known: JsonObject = json.loads((PARTS / "models.json").read_text("utf-8"))
    presets = {path.parent.name: json.loads(path.read_text("utf-8")) for path in sorted(PRESETS.glob("*/config.json"))}
    return known | presets
