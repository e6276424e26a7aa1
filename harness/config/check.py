"""Says everything that is wrong with a config, before any process starts."""

from __future__ import annotations

from harness.config.diagnostic import Diagnostic
from harness.config.document import Document


def check(
    document: Document, *, world_size: int | None = None, model: str | None = None, target: str = "harness"
) -> list[Diagnostic]:
    """All findings about a config, in the order of the file."""
    return []
