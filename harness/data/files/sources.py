"""Parse `--train_file` and `--validation_file`: paths, perhaps with weights (`chat.jsonl:0.7 books/:0.3`).

A source is one of

- a file in a format of `formats/`: a .txt file is one document, others have one a row (see `rows/kinds.py`);
- a directory of such files of one kind, searched recursively: links followed, sorted by path, hidden files left out;
- a glob of files and directories;
- token files (see `token_files.py`);
- "python-stdlib": the source files of the running Python's standard library.

In a directory, .json, .csv and the like count only if there are no other data files: beside those they are metadata.

Sources without weights form one data set, in the order given. With weights, each source provides its share of the
samples, and kinds may differ. Nothing here imports torch or datasets, so a wrong path is reported at once.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from stat import S_ISREG

from harness.arguments.themes.script import PYTHON_STDLIB
from harness.data.files.token_files import require_token_files, token_paths
from harness.data.formats import FORMATS, TOKEN_FORMATS, format_of
from harness.data.formats.txt_format import decodes
from harness.data.rows.kinds import TEXT, columns_of
from harness.errors import UserError

TOKENS = "tokens"
"""The kind of token files; see `token_files.py`."""
DESCRIBE_DATA = tuple(suffix for suffix, each in FORMATS.items() if each.describes_data)
"""Suffixes that count as data in a directory only if it holds no other data files."""

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz")
# Left out of python-stdlib: installed packages, the library's tests (two thirds of the bytes) and programs.
_BESIDE_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"})


@dataclass(frozen=True)
class SourceGroup:
    """Sources of one kind that form one data set; `weight` is its share of the samples, relative to the others."""

    paths: tuple[str, ...]
    kind: str
    weight: float | None


def source_groups(
    words: Sequence[str], flag: str = "--train_file", kind_of: Callable[[str], str] | None = None
) -> list[SourceGroup]:
    """Parse the words of a flag into groups of sources. UserError for a source or weight that cannot be used.

    `kind_of` returns the kind of a path's rows; by default it is read from the files.
    """
    split = [_split(word) for word in words]
    weighted = [path for path, weight in split if weight is not None]
    if not split:
        raise UserError(f"{flag}: give a file or directory")
    if weighted and len(weighted) < len(split):
        plain = next(path for path, weight in split if weight is None)
        raise UserError(f"{flag}: {weighted[0]} has a weight, {plain} has none: give each a weight, or none")
    kinds = [(kind_of or _kind)(path) for path, _ in split]
    if weighted:
        return [SourceGroup((path,), kind, weight) for (path, weight), kind in zip(split, kinds, strict=True)]
    for (path, _), kind in zip(split, kinds, strict=True):
        if kind != kinds[0]:
            first = f"{split[0][0]} has {columns_of(kinds[0])}"
            raise UserError(f"{first}, {path} has {columns_of(kind)}: give each a weight, or train on one kind")
    return [SourceGroup(tuple(path for path, _ in split), kinds[0], None)]


def validation_group(words: Sequence[str], kind_of: Callable[[str], str] | None = None) -> SourceGroup:
    """Parse `--validation_file`. UserError for weights: every evaluation sample counts once."""
    groups = source_groups(words, "--validation_file", kind_of)
    if groups[0].weight is not None:
        raise UserError(f"--validation_file {words[0]}: weights are for --train_file: every sample here counts once")
    return groups[0]


def _split(word: str) -> tuple[str, float | None]:
    """Split a word into path and weight. A path that exists with its colon has none. UserError for a bad weight."""
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
    """Return the kind of a source's rows, or TOKENS; UserError if it cannot be used."""
    if files := find_tokens(path):
        require_token_files(files)
        return TOKENS
    return preflight(path)


def find_tokens(path: str) -> list[Path]:
    """Return the token files of a path: a file, Megatron's prefix, or a directory or glob without text files.

    Hidden files are left out, and so are files such as .json and .csv, which only describe token files.
    """
    if glob.has_magic(path) and not Path(path).exists():
        files = _matched(path, visible_files)
    elif Path(path).is_dir():
        files = visible_files(Path(path))
    else:
        return token_paths(path)
    if any(file.suffix in FORMATS and file.suffix not in DESCRIBE_DATA for file in files):
        return []
    return [file for file in files if file.suffix in TOKEN_FORMATS]


def _matched(pattern: str, files_in: Callable[[Path], list[Path]]) -> list[Path]:
    """Return the files that match a glob, and those that `files_in` finds in matched directories, each once."""
    matches = map(Path, sorted(glob.glob(pattern, recursive=True)))  # noqa: PTH207  # may be absolute
    return list(dict.fromkeys(file for match in matches for file in (files_in(match) if match.is_dir() else [match])))


def _names_something(path: str) -> bool:
    return path == PYTHON_STDLIB or Path(path).exists() or glob.has_magic(path) or bool(token_paths(path))


def preflight(source: str | os.PathLike[str]) -> str:
    """Return the kind of a source's rows, as in `rows/kinds.py`. UserError for a file that cannot be used.

    Reads one directory listing and the first row of each file.
    """
    files = find_files(source)
    if os.fspath(source) == PYTHON_STDLIB:
        return TEXT
    kinds: dict[str, Path] = {}
    for file in files:
        try:
            stat = file.stat()
            if not S_ISREG(stat.st_mode):
                raise UserError(f"{file} is a pipe, a socket or a device: give a file that can be read more than once")
            kind = _looked_at(file, stat.st_size, stat.st_ctime_ns)
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error
        if kind is not None:
            kinds.setdefault(kind, file)
    if not kinds:
        raise UserError(f"{source} is empty: give text to train on")
    if len(kinds) > 1:
        (first, a), (second, b), *_ = kinds.items()
        raise UserError(f"{a} has {columns_of(first)}, {b} has {columns_of(second)}: train on one kind at a time")
    return next(iter(kinds))


@cache
def _looked_at(file: Path, size: int, _changed_ns: int) -> str | None:
    """Return the kind of a file's rows. Cached by size and time of change, as a start needs it several times."""
    return format_of(file).kind(file) if size else None


def find_files(source: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a source in reading order. UserError if there are none."""
    if os.fspath(source) == PYTHON_STDLIB:
        return _stdlib_files()
    path = Path(source)
    suffixes = ", ".join(FORMATS)
    if not path.exists() and glob.has_magic(os.fspath(source)):
        files = _matched(os.fspath(source), _in_directory)
        if files := [file for file in files if file.suffix in FORMATS]:
            return files
        raise UserError(f"{source} matches no {suffixes} file: correct the pattern")
    if path.is_dir():
        if files := _in_directory(path):
            return files
        raise UserError(f"{path} contains no file with one of the suffixes {suffixes}")
    if not path.exists():
        several = str(path).replace(",", " ").split()
        if len(several) > 1 and ("," in str(path) or Path(several[0]).exists()):
            listed = f"{' '.join(several)} (in a --config file: [{', '.join(several)}])"
            raise UserError(f"{path} does not exist: separate several files by spaces: {listed}")
        raise UserError(f"{path} does not exist: give a {suffixes} file, a directory of them, or {PYTHON_STDLIB}")
    if path.suffix not in FORMATS:
        if path.suffix in _COMPRESSED:
            raise UserError(f"{path} is compressed: unpack it first")
        raise UserError(f"{path} is not one of {suffixes}: convert it, or rename it if it is plain text")
    return [path]


def _in_directory(top: Path) -> list[Path]:
    files = [file for file in visible_files(top) if file.suffix in FORMATS]
    return [file for file in files if file.suffix not in DESCRIBE_DATA] or files


def visible_files(top: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files under `top`, sorted by relative path, without hidden ones and the directories `left_out`."""

    def stop(error: OSError) -> None:
        raise UserError(f"cannot list {error.filename}: {error.strerror}") from error

    found = []
    seen = set()  # links to directories are followed; a cycle of them would never end
    for here, directories, names in os.walk(top, onerror=stop, followlinks=True):
        if (real := os.path.realpath(here)) in seen:
            directories.clear()
            continue
        seen.add(real)
        directories[:] = [d for d in directories if not d.startswith(".") and d not in left_out]
        found += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(top).parts)


def _stdlib_files() -> list[Path]:
    """Return the .py files of the running Python's standard library, without tests and installed packages."""
    top = Path(sysconfig.get_path("stdlib"))
    files = (
        [file for file in visible_files(top, _BESIDE_STDLIB) if file.suffix == ".py" and decodes(file)]
        if top.is_dir()
        else []
    )
    if not files:
        raise UserError(f"no standard library sources under {top}: give a --train_file")
    return files
