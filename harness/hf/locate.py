"""Locate a model's files without importing torch or transformers, so that a wrong name fails at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.config.model.facts import require_countable
from harness.config.model.hub import MODEL, fetch
from harness.config.values.json_file import read_json, require_regular_files
from harness.errors import UserError

MODELS = Path(__file__).resolve().parents[1] / "models"
PRESETS = MODELS / "presets"
PLANS = MODELS / "plans"
ADAPTERS = "adapter_config.json"
DEFAULT_MODEL = "tiny-llama"


def presets() -> list[str]:
    return sorted(path.parent.name for path in PRESETS.glob("*/config.json"))


def model_directory(name: str, flag: str = MODEL.flag) -> Path:
    """Return the directory of a preset, a path, or a hub id, whose files are downloaded if necessary.

    Raises UserError, naming the `flag`, if it has no readable config.json.
    """
    directory = PRESETS / name if name in presets() else Path(name)
    if directory.is_file():
        raise UserError(f"{flag} {name}: is a file: give its directory, {directory.parent}")
    if not directory.exists():
        directory = fetch(name, replace(MODEL, flag=flag)) or directory
    config = directory / "config.json"
    if not config.is_file() and (directory / ADAPTERS).is_file():
        raise UserError(
            f"{flag} {name}: contains adapters but no model: give the base model, or merge "
            "them into it with ds-harness checkpoint merge"
        )
    if not config.is_file():
        raise UserError(
            f"{flag} {name}: no config.json in a directory of that name: "
            f"give a HuggingFace model directory, an id of the hub as organisation/name, or a preset: "
            f"{', '.join(presets())}"
        )
    try:
        content = read_json(config)
    except (OSError, ValueError) as error:
        raise UserError(f"{config}: is not valid JSON: {error}") from error
    if not isinstance(content, dict) or not ("model_type" in content or "architectures" in content):
        raise UserError(f"{config}: has no model_type: save the model with save_pretrained")
    require_regular_files(directory)
    require_countable(content, str(config))
    return directory
