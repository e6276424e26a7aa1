"""The type of what a JSON file holds."""

from __future__ import annotations

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""An object in a JSON file: a config, a section of one, a schema. Who reads a key knows what it holds."""
