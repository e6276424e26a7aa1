"""What the check says of a config, as a test compares it."""

from __future__ import annotations

import json
from typing import Any

from harness.checking import check, resolve
from harness.config import AutoValues
from harness.config.text.diagnostic import ConfigError
from harness.config.text.document import from_text


def said(config: dict[str, Any] | str, code: str, **options: Any) -> list[str]:
    """The findings of one rule, as `error /pointer: message; hint`; batch sizes are there unless the config says so."""
    if isinstance(config, dict) and not any("batch_size" in name or "accumulation" in name for name in config):
        config = {"train_batch_size": 8, **config}
    text = config if isinstance(config, str) else json.dumps(config)
    found = [item for item in check(from_text(text), **options) if item.code == code]
    return [f"{item.severity.value} {item.pointer}: {item.message}; {item.hint}" for item in found]


def refusals_of_run(config: dict[str, Any], **arguments: Any) -> list[str]:
    """Why a run with these arguments is refused, as `CODE message; hint`."""
    try:
        values = AutoValues(**arguments, given=frozenset(arguments) - {"world_size"})
        resolve({"train_micro_batch_size_per_gpu": 1, **config}, values)
    except ConfigError as error:
        return [f"{item.code} {item.message}; {item.hint}" for item in error.diagnostics]
    return []
