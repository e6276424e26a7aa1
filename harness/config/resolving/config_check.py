"""The extension point for the config check, which a run calls before and after "auto" is replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from harness.config.resolving.resolved import Filled
from harness.config.values.arguments import AutoValues
from harness.config.values.config_file import FROM_PROGRAM, ConfigFile
from harness.config.values.json_object import JsonObject


class ConfigCheck(Protocol):
    """A check of a run's config. Without a check, the config is taken as written, and a run fails where it is wrong."""

    def read(self, config: str | Mapping[str, object], path: str = FROM_PROGRAM) -> ConfigFile:
        """Read a config: a file, a preset by its name, or values of a program, which are from `path`.

        Raises ConfigError, with the position, for a file that cannot be read.
        """

    def as_read(self, config: Mapping[str, object]) -> JsonObject:
        """Return a copy with values as DeepSpeed reads them: `"true"` becomes true, old forms become new ones."""

    def require_valid(
        self,
        document: ConfigFile,
        filled: Sequence[Filled],
        values: AutoValues,
        *,
        model: str | None,
        allow_ignored_keys: bool,
    ) -> None:
        """Raise ConfigError with all findings that prevent the run from starting.

        Args:
            document: the result of `read`.
            filled: values from arguments that replaced "auto" and absent keys.
            values: the run's arguments.
            model: a preset's name or a directory, whose heads and layers the layout must fit; None if unknown.
            allow_ignored_keys: whether to accept ignored keys that look like misspelt ones.
        """

    def version_warning(self) -> str | None:
        """Return a warning if the check was written for another DeepSpeed version than the installed one, else None."""
