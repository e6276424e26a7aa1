"""Where data lies and whether it can be read: the files behind `--train_file`, and documents out of them.

A source is a .txt file (one document), a .jsonl, .json, .csv or .parquet file (one document a row: text or a
conversation, see `rows.py`), a directory of such files, all of one kind (searched recursively, links followed, sorted
by path, hidden ones left out), a glob of both, or "python-stdlib": the running Python's standard library. In a
directory, .json and .csv files count only where nothing else does: beside data they describe it. `preflight` needs
neither torch nor datasets, so a wrong path is reported before anything is built.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

import numpy as np

from harness.arguments.themes.script import PYTHON_STDLIB
from harness.data.files.copies import copied
from harness.data.files.extents import Extent, planned
from harness.data.files.readers import SUFFIXES, decodes, kind_of_file, read_documents_of
from harness.data.files.rows import TEXT, columns_of
from harness.data.on_disk.cache import cache_error, fingerprint, prepared_folder
from harness.data.pieces import parts_of
from harness.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

# Not the library itself: what is installed beside it, its tests (two thirds of the bytes) and its programs.
_BESIDE_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz")

DESCRIBE_DATA = (".json", ".csv")

# Part of the cache key: raise it when the documents made from the same files change.
_FORMAT = 5


def preflight(source: str | os.PathLike[str]) -> str:
    """Return what a source's rows are (a kind of `rows.py`), each of its files looked at. UserError if one is unusable.

    Costs one directory listing and the first row of each file; the rest of a file is not read.
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
            kind = _looked_at(file, stat.st_size, stat.st_mtime_ns)
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
    """Return what the rows of a file are. Each is opened once, however often a start asks for it."""
    return kind_of_file(file) if size else None


def find_files(source: str | os.PathLike[str]) -> list[Path]:
    """Return the files that make up a source, in the order they are read in. UserError where there are none."""
    if os.fspath(source) == PYTHON_STDLIB:
        return _stdlib_files()
    path = Path(source)
    suffixes = ", ".join(SUFFIXES)
    if not path.exists() and glob.has_magic(os.fspath(source)):
        matches = map(Path, sorted(glob.glob(os.fspath(source), recursive=True)))  # noqa: PTH207  # may be absolute
        files = [file for match in matches for file in (_in_directory(match) if match.is_dir() else [match])]
        if files := [file for file in dict.fromkeys(files) if file.suffix in SUFFIXES]:  # ** matches folders too
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
    if path.suffix in _COMPRESSED:
        raise UserError(f"{path} is compressed: unpack it first")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} is not one of {suffixes}: convert it, or rename it if it is plain text")
    return [path]


def _in_directory(top: Path) -> list[Path]:
    files = [file for file in visible_files(top) if file.suffix in SUFFIXES]
    return [file for file in files if file.suffix not in DESCRIBE_DATA] or files


def read_documents(
    source: str | os.PathLike[str] | Sequence[str],
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
    workers: int | None = None,
) -> Dataset:
    """Return the documents of a source, or of several of one kind in order: a `datasets.Dataset` mapped from disk.

    Its columns are `text` and `part`: a long text comes in several rows, its parts, numbered from 0. Of conversations
    they are `conversation` and `place`. A .txt file's text is its bytes decoded as UTF-8 and nothing else: no newline
    is added, dropped or translated. Memory is taken for a few rows at a time. The copy lies in
    `cache_dir` (default HF_DATASETS_CACHE), made by processes as `make_shards` says, and is used again while paths,
    sizes and modification times of the files stay as they are. Raises UserError as `preflight` does, and for text
    that cannot be decoded, a line that is not JSON, a row that is not like the others.
    """
    from datasets import Features, Value

    sources = [source] if isinstance(source, str | os.PathLike) else source
    (kind,) = {preflight(source) for source in sources}
    files = [file.absolute() for source in sources for file in find_files(source)]
    stamps = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())]
    text = Value("large_string")
    features = {"text": text, "part": Value("int32")} if kind == TEXT else {"conversation": text, "place": text}
    folder = prepared_folder(cache_dir) / fingerprint("sources", _FORMAT, kind, *stamps)
    try:
        shards, read = planned(files, folder), partial(_documents, kind=kind)
        return copied(folder, shards, read, Features(features), say=say, workers=workers)
    except OSError as error:  # the reader raises its own as UserError: this is the writer's
        raise cache_error(error, cache_dir) from error


def hold_out(documents: Dataset, part: Fraction = Fraction(1, 20)) -> tuple[Dataset, Dataset]:
    """Return documents for training and for evaluation: this part of them, evenly from the first on, is held out.

    UserError if there are not two documents to share between them.
    """
    number = np.cumsum(parts_of(documents) == 0) - 1  # of the document that a row belongs to
    total = int(number[-1]) + 1 if len(number) else 0
    if total < 2:
        raise UserError(f"{total} document cannot be split for evaluation: give a --validation_file")
    part = part.limit_denominator(2**62 // total)  # so that the products below fit into 64 bits
    held_out = number * part.numerator // part.denominator != (number - 1) * part.numerator // part.denominator
    return documents.select(np.flatnonzero(~held_out)), documents.select(np.flatnonzero(held_out))


def _documents(extents: Sequence[Extent], kind: str) -> Iterator[dict[str, str | int]]:
    """Read one part of a file after the other."""
    for extent in extents:
        try:
            yield from read_documents_of(extent, kind)
        except OSError as error:
            raise UserError(f"cannot read {extent.file}: {error.strerror or error}") from error


def visible_files(top: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files under `top`, sorted by relative path, without hidden ones and the directories `left_out`."""

    def stop(error: OSError) -> None:
        raise UserError(f"cannot list {error.filename}: {error.strerror}") from error

    found = []
    seen = set()  # links to directories are followed, but no circle of them is
    for here, directories, names in os.walk(top, onerror=stop, followlinks=True):
        if (real := os.path.realpath(here)) in seen:
            directories.clear()
            continue
        seen.add(real)
        directories[:] = [d for d in directories if not d.startswith(".") and d not in left_out]
        found += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(top).parts)


def _stdlib_files() -> list[Path]:
    """Return the .py files of the standard library of the Python that runs, without tests and installed packages."""
    top = Path(sysconfig.get_path("stdlib"))
    files = (
        [file for file in visible_files(top, frozenset(_BESIDE_STDLIB)) if file.suffix == ".py" and decodes(file)]
        if top.is_dir()
        else []
    )
    if not files:
        raise UserError(f"no standard library sources under {top}: give a --train_file")
    return files
