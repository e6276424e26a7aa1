"""The type of the content of a JSON file."""

from __future__ import annotations

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""An object in a JSON file: a config, a section of one, a schema. The code that reads a key knows its type."""
