"""The extension point of the config check: what a run asks it before and after "auto" is filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from harness.config.resolving.resolved import Filled
from harness.config.values.arguments import AutoValues
from harness.config.values.config_file import FROM_PROGRAM, ConfigFile
from harness.config.values.json_object import JsonObject


class ConfigCheck(Protocol):
    """A check of a run's config. Without one a run takes the config as it is written, and fails where it is wrong."""

    def read(self, config: str | Mapping[str, object], path: str = FROM_PROGRAM) -> ConfigFile:
        """Read a config: a file, a preset by its name, or values of a program, which are from `path`.

        Raises ConfigError, with the position, for a file that cannot be read.
        """

    def as_read(self, config: Mapping[str, object]) -> JsonObject:
        """Return a copy with the values that DeepSpeed reads: `"true"` becomes true, old forms become new ones."""

    def require_valid(
        self,
        document: ConfigFile,
        filled: Sequence[Filled],
        values: AutoValues,
        *,
        model: str | None,
        allow_ignored_keys: bool,
    ) -> None:
        """Raise ConfigError with every finding that keeps a run from starting.

        Args:
            document: what `read` has returned.
            filled: values that arguments put in place of "auto" and of absent keys.
            values: arguments of the run.
            model: a preset's name or a directory; its heads and layers are checked against the layout. None: no check.
            allow_ignored_keys: accept ignored keys that look like misspelt ones.
        """

    def version_warning(self) -> str | None:
        """Return a warning if the check was made for another DeepSpeed than the installed one; else None."""
