"""The extension point of the config check: what a run asks it before and after "auto" is filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from harness.config.resolving.resolved import Filled
from harness.config.text.document import Document
from harness.config.values.arguments import AutoValues
from harness.config.values.json_object import JsonObject


class ConfigCheck(Protocol):
    """A check of a run's config. Without one a run takes the config as it is written, and fails where it is wrong."""

    def as_read(self, config: Mapping[str, object]) -> JsonObject:
        """Return a copy with the values that DeepSpeed reads: `"true"` becomes true, old forms become new ones."""

    def require_valid(
        self,
        document: Document,
        filled: Sequence[Filled],
        values: AutoValues,
        *,
        model: str | None,
        allow_ignored_keys: bool,
    ) -> None:
        """Raise ConfigError with every finding that keeps a run from starting.

        Args:
            document: the file.
            filled: values that arguments put in place of "auto" and of absent keys.
            values: arguments of the run.
            model: a preset's name or a directory; its heads and layers are checked against the layout. None: no check.
            allow_ignored_keys: accept ignored keys that look like misspelt ones.
        """

    def version_warning(self) -> str | None:
        """Return a warning if the check was made for another DeepSpeed than the installed one; else None."""
