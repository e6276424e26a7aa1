"""Describe for `run.json` the files that the script's flags name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.arguments.themes.script import PYTHON_STDLIB
from harness.config.values.json_object import JsonObject
from harness.data.files.sources import TOKENS, find_files, find_tokens, source_groups
from harness.errors import UserError

_FLAGS = ("train_file", "validation_file")
_MOST_FILES = 1000


def data_files(flags: Mapping[str, object]) -> JsonObject:
    """Return the files that the script's flags name, with sizes in bytes; only the first 1,000 are listed."""
    return described_files(flags, _files_of_groups)


def _files_of_groups(words: Sequence[str]) -> list[Path]:
    paths = [(group.kind, path) for group in source_groups(words) for path in group.paths]
    return [file for kind, path in paths for file in (find_tokens if kind == TOKENS else find_files)(path)]


def described_files(flags: Mapping[str, object], find: Callable[[Sequence[str]], list[Path]]) -> JsonObject:
    """Return the files that `find` finds for the script's flags, as `data_files` does."""
    found: JsonObject = {}
    for name in _FLAGS:
        given = flags.get(name)
        if not given:
            continue
        words = (given,) if isinstance(given, str) else tuple(given)  # type: ignore[arg-type]  # a flag's words
        try:
            sizes = {str(file): file.stat().st_size for file in find(words)}
        except (OSError, UserError) as error:  # deleted since they were read
            found[name] = {"unreadable": str(error)}
            continue
        of_python = any(word.partition(":")[0] == PYTHON_STDLIB for word in words)
        listed = {} if of_python else dict(list(sizes.items())[:_MOST_FILES])
        found[name] = {"files": len(sizes), "bytes": sum(sizes.values()), "sizes": listed}
    return found
