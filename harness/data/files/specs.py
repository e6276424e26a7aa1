"""The words of `--train_file`: paths, and weights behind a colon, as `chat.jsonl:0.7 books/:0.3`.

Sources without weights are one: their files are read in the order given. With weights each gives its share of the
samples of a run, and each may be of another kind. Nothing here needs torch or datasets.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from harness.arguments.themes.script import PYTHON_STDLIB
from harness.data.files.readers import SUFFIXES
from harness.data.files.rows import columns_of
from harness.data.files.sources import DESCRIBE_DATA, preflight, visible_files
from harness.data.files.token_files import require_token_files, token_paths
from harness.errors import UserError

TOKENS = "tokens"
"""The kind of files that hold token ids; see `token_files.py`."""


@dataclass(frozen=True)
class SourceGroup:
    """Sources of one kind that become one data set; `weight`: its share of the samples, in proportion to others'."""

    paths: tuple[str, ...]
    kind: str
    weight: float | None


def source_groups(words: Sequence[str], flag: str = "--train_file") -> list[SourceGroup]:
    """Return what these words name, each source looked at. UserError for a source or weight that is unusable."""
    split = [_split(word) for word in words]
    weighted = [path for path, weight in split if weight is not None]
    if not split:
        raise UserError(f"{flag}: give a file or directory")
    if weighted and len(weighted) < len(split):
        plain = next(path for path, weight in split if weight is None)
        raise UserError(f"{flag}: {weighted[0]} has a weight, {plain} has none: give each a weight, or none")
    kinds = [_kind(path) for path, _ in split]
    if weighted:
        return [SourceGroup((path,), kind, weight) for (path, weight), kind in zip(split, kinds, strict=True)]
    for (path, _), kind in zip(split, kinds, strict=True):
        if kind != kinds[0]:
            first = f"{split[0][0]} has {columns_of(kinds[0])}"
            raise UserError(f"{first}, {path} has {columns_of(kind)}: give each a weight, or train on one kind")
    return [SourceGroup(tuple(path for path, _ in split), kinds[0], None)]


def validation_group(words: Sequence[str]) -> SourceGroup:
    """Return what `--validation_file` names, looked at. UserError for weights: every sample counts once."""
    groups = source_groups(words, "--validation_file")
    if groups[0].weight is not None:
        raise UserError(f"--validation_file {words[0]}: weights are for --train_file: every sample here counts once")
    return groups[0]


def _split(word: str) -> tuple[str, float | None]:
    """Return a path and the weight behind it. A path that exists as it stands has none."""
    path, colon, text = word.rpartition(":")
    if not colon or Path(word).exists() or not _names_something(path):
        return word, None
    try:
        weight = float(text)
    except ValueError:
        raise UserError(f"{word}: the weight {text!r} is not a number: write {path}:0.5") from None
    if not (weight > 0 and isfinite(weight)):
        raise UserError(f"{word}: the weight must be a number above 0")
    return path, weight


def _kind(path: str) -> str:
    """Return what a source's rows are, or TOKENS; UserError if it cannot be used."""
    if files := find_tokens(path):
        require_token_files(files)
        return TOKENS
    return preflight(path)


def find_tokens(path: str) -> list[Path]:
    """Return the token files that a path names: a file, Megatron's prefix, or those in a directory or glob without
    text. Hidden files, and the .json and .csv files that describe token files, do not count."""
    if glob.has_magic(path) and not Path(path).exists():
        matches = map(Path, sorted(glob.glob(path, recursive=True)))  # noqa: PTH207  # may be absolute
        files = [file for match in matches for file in (visible_files(match) if match.is_dir() else [match])]
    elif Path(path).is_dir():
        files = visible_files(Path(path))
    else:
        return token_paths(path)
    if any(file.suffix in SUFFIXES and file.suffix not in DESCRIBE_DATA for file in files):
        return []
    return [file for file in dict.fromkeys(files) if file.suffix in (".bin", ".ds")]


def _names_something(path: str) -> bool:
    return path == PYTHON_STDLIB or Path(path).exists() or glob.has_magic(path) or bool(token_paths(path))
