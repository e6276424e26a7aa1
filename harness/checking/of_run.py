"""The config check as a run asks for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from harness.checking.check import findings, known_shape, refusals
from harness.checking.rules.view import RunView
from harness.checking.schema import version_warning
from harness.checking.schema.normalize import as_read
from harness.config.resolving.config_check import ConfigCheck
from harness.config.resolving.resolve import complete, resolve_before_data
from harness.config.resolving.resolved import Filled, Resolved
from harness.config.text.diagnostic import ConfigError
from harness.config.text.document import Document, from_values, load
from harness.config.values.arguments import AutoValues
from harness.config.values.config_file import FROM_PROGRAM, ConfigFile
from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import put


class ConfigRules(ConfigCheck):
    """All rules, which see the file and the arguments together, and what follows from them."""

    def read(self, config: str | Mapping[str, object], path: str = FROM_PROGRAM) -> Document:
        """Read a config with the line and column of everything in it."""
        return load(config) if isinstance(config, str) else from_values(config, path)

    def as_read(self, config: Mapping[str, object]) -> JsonObject:
        """Return a copy with the values that DeepSpeed reads."""
        return as_read(config)

    def require_valid(
        self,
        document: ConfigFile,
        filled: Sequence[Filled],
        values: AutoValues,
        *,
        model: str | None,
        allow_ignored_keys: bool,
    ) -> None:
        """Raise ConfigError with every finding that keeps a run from starting."""
        # rules look at values as they are written, so they get the filled file, not the values that DeepSpeed reads
        written = copy.deepcopy(dict(document.data))
        for item in filled:
            put(written, item.pointer, item.value)
        if not isinstance(document, Document):
            document = from_values(document.data, document.path)
        view = RunView.of(
            document, data=written, model=known_shape(model, "harness"), arguments=values, **values.layout
        )
        refused = refusals(findings(view), allow_ignored_keys=allow_ignored_keys)
        if refused:
            raise ConfigError(refused)

    def version_warning(self) -> str | None:
        """Return a warning if the rules were tested with another DeepSpeed than the installed one; else None."""
        return version_warning()


def resolve(
    config: Mapping[str, object] | ConfigFile,
    values: AutoValues,
    *,
    model: str | None = None,
    allow_ignored_keys: bool = False,
) -> Resolved:
    """Check a config together with the arguments of its run, and fill in every "auto".

    Raises:
        ConfigError: with every finding that keeps the run from starting.
    """
    before = resolve_before_data(
        config, values, check=ConfigRules(), model=model, allow_ignored_keys=allow_ignored_keys
    )
    return complete(before, values)
