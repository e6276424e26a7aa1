"""The DeepSpeed JSON of a run as plain values; without the config check, Python's own reader reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.config.values.json_file import read_json
from harness.config.values.json_object import JsonObject
from harness.errors import UserError, reason

PRESETS = Path(__file__).resolve().parents[2] / "ds_configs"
FROM_PROGRAM = "<config>"
"""The path of a config passed by a program instead of a file."""


class ConfigFile(Protocol):
    """A config as read: its origin and its values."""

    @property
    def path(self) -> str:
        """The file; FROM_PROGRAM for values from a program, "" for defaults."""

    @property
    def data(self) -> JsonObject:
        """The values."""


@dataclass(frozen=True)
class PlainConfig:
    """A config without the positions of its values."""

    path: str
    data: JsonObject


def preset_file(source: str) -> Path | None:
    """Return the file of a packaged preset; None if `source` is a path or not the name of a preset."""
    # The user's own file wins, even a link to nowhere, which is then told as such.
    if not source or os.path.lexists(source) or os.sep in source:
        return None
    preset = PRESETS / f"{source.removesuffix('.json')}.json"
    return preset if preset.is_file() else None


def read_plain(config: str | Mapping[str, object], path: str = FROM_PROGRAM) -> PlainConfig:
    """Read a config: a file, a preset by name, or values from a program, which get `path`. Raises UserError."""
    if isinstance(config, Mapping):
        # A copy in JSON's types, as from a file: a tuple becomes a list.
        return PlainConfig(path, json.loads(json.dumps(dict(config))))
    file = preset_file(config) or Path(config)
    try:
        data = read_json(file)
    except OSError as error:
        raise UserError(f"{file}: {reason(error)}") from error
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{file}: a config is an object: write {{ ... }}")
    return PlainConfig(str(file), data)
