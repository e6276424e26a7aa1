"""Tell from a config.json alone whether a model can be cut for tensor parallelism. No torch, no transformers.

The stored matrix knows which families declare a plan, but only for the transformers version that it was made with. A
packaged plan file lists the cases that it refuses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.config.values.json_object import JsonObject

MODELS = Path(__file__).resolve().parents[2] / "models"


def plan_refusal(config: Mapping[str, object]) -> str | None:
    """Return why a model with this config.json cannot be cut for tensor parallelism; None if no reason is known.

    For a multimodal model only the text decoder is sharded; the decoder or the whole model may declare its plan.
    """
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    families = [part.get("model_type") for part in parts]
    if any(key.startswith("base_model_") for part in parts for key in part):  # a plan of its own
        return None
    rows = families_of_matrix()
    if all(str(family) in rows and _is_planless(str(family), rows) for family in families):
        return f"model type {families[-1]!r} has no tensor-parallel plan"
    return _refused_case(parts[-1])


def expert_plan_refusal(config: Mapping[str, object]) -> str | None:
    """Return why the experts of a model with this config.json cannot be distributed whole; None if they can."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    family = parts[-1].get("model_type")
    has_own = any(key.startswith("base_model_") for part in parts for key in part)
    if has_own or family not in families_of_matrix() or spreads_experts(config):
        return None
    return f"model type {family!r} declares no expert-parallel plan"


def spreads_experts(config: Mapping[str, object]) -> bool:
    """Return whether transformers' configuration of the family, or its plan file, declares an expert-parallel plan."""
    text = config.get("text_config")
    part = text if isinstance(text, Mapping) else config
    file = plan_file(part.get("model_type"))
    declared = declares_expert_plan(str(part.get("model_type")).replace("-", "_").removesuffix("_text"))
    return declared or bool(file and file.get("experts"))


def declares_expert_plan(family: str) -> bool:
    """Return whether the installed transformers' configuration of a family has an expert-parallel plan."""
    found = util.find_spec("transformers")
    folders = found.submodule_search_locations if found is not None else None
    return any(
        "ep_dispatch_experts" in path.read_text(encoding="utf-8")
        for folder in folders or ()
        for path in Path(folder, "models", family).glob("configuration_*.py")
    )


def planless_family() -> str:
    """Return a model type without a plan, for an example."""
    rows: dict[str, dict[str, str]] = _matrix()["families"]
    return min(family for family in rows if _is_planless(family, rows))


@cache
def _matrix() -> JsonObject:
    content: JsonObject = json.loads((MODELS / "matrix.json").read_text(encoding="utf-8"))
    return content


@cache
def families_of_matrix() -> dict[str, dict[str, str]]:
    """Return the rows of the stored matrix; none if it was made with another transformers than the installed one."""
    matrix = _matrix()
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        installed = matrix["transformers"]
    rows: dict[str, dict[str, str]] = matrix["families"] if installed == matrix["transformers"] else {}
    return rows


def _is_planless(family: str, rows: Mapping[str, Mapping[str, str]]) -> bool:
    return "plan" not in rows[family] and plan_file(family) is None


def plan_file(family: object) -> JsonObject | None:
    """Return the content of a family's packaged plan file, or None."""
    path = MODELS / "plans" / f"{family}.json"
    if not path.is_file():
        return None
    content: JsonObject = json.loads(path.read_text(encoding="utf-8"))
    return content


def _refused_case(config: Mapping[str, object]) -> str | None:
    """Return why a plan file refuses this config.json; fields that it leaves out have the defaults of the family."""
    plan = plan_file(config.get("model_type"))
    if plan is None:
        return None
    for case in plan.get("cases", []):
        if "refuse" in case and all(config.get(field, ...) == value for field, value in case["if"].items()):
            stated = " and ".join(f"{field} {value}" for field, value in case["if"].items())
            return f"model type {config['model_type']!r} with {stated} has no tensor-parallel plan: {case['refuse']}"
    return None
