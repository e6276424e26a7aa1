"""Describe for `run.json` the files that the script's flags name."""

from __future__ import annotations

from collections.abc import Mapping

from harness.arguments.themes.script import PYTHON_STDLIB
from harness.config.values.json_object import JsonObject
from harness.data.files.sources import TOKENS, find_files, find_tokens, source_groups
from harness.errors import UserError

_FLAGS = ("train_file", "validation_file")
_MOST_FILES = 1000


def data_files(flags: Mapping[str, object]) -> JsonObject:
    """Return the files that the script's flags name, with sizes in bytes; only the first 1,000 are listed."""
    found: JsonObject = {}
    for name in _FLAGS:
        given = flags.get(name)
        if not given:
            continue
        words = (given,) if isinstance(given, str) else tuple(given)  # type: ignore[arg-type]  # a flag's words
        try:
            groups = source_groups(words)
            paths = [(group.kind, path) for group in groups for path in group.paths]
            files = [file for kind, path in paths for file in (find_tokens if kind == TOKENS else find_files)(path)]
            sizes = {str(file): file.stat().st_size for file in files}
        except (OSError, UserError) as error:  # deleted since they were read
            found[name] = {"unreadable": str(error)}
            continue
        listed = {} if PYTHON_STDLIB in dict(paths).values() else dict(list(sizes.items())[:_MOST_FILES])
        found[name] = {"files": len(sizes), "bytes": sum(sizes.values()), "sizes": listed}
    return found
