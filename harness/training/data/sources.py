"""Where text lies and whether it can be read: the files behind `--train_file`, and documents out of them.

A source is a .txt file (one document), a .jsonl or .parquet file (column `text`, one document a row), a
directory of such files (searched recursively, links followed, sorted by path, hidden ones left out) or
"python-stdlib": the running Python's standard library. `preflight` needs neither torch nor datasets, so a
wrong path is told before anything is built.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.training.data.readers import READERS, check_head, decodes

if TYPE_CHECKING:
    from datasets import Dataset

PYTHON_STDLIB = "python-stdlib"

# Not the library itself: what is installed beside it, its tests (two thirds of the bytes) and its programs.
_BESIDE_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}

# Part of the cache key: raise it when the documents made from the same files change.
_FORMAT = 1


def preflight(source: str | os.PathLike[str]) -> list[Path]:
    """The files of a source, each looked at: it opens, and its first row has text. UserError if not.

    Costs one directory listing and the first bytes of each file; the rest of a file is not read.
    """
    files = find_files(source)
    if os.fspath(source) == PYTHON_STDLIB:
        return files
    sizes = []
    for file in files:
        try:
            with file.open("rb") as stream:
                sizes.append(os.fstat(stream.fileno()).st_size)
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error
        if sizes[-1]:
            check_head(file)
    if not any(sizes):
        raise UserError(f"{source} is empty: give text to train on")
    return files


def find_files(source: str | os.PathLike[str]) -> list[Path]:
    """The files that make up a source, in the order they are read in. UserError where there are none."""
    if os.fspath(source) == PYTHON_STDLIB:
        return _stdlib_files()
    path = Path(source)
    suffixes = ", ".join(READERS)
    if path.is_dir():
        files = [file for file in _walk(path) if file.suffix in READERS]
        if not files:
            raise UserError(f"{path} holds no file with one of the suffixes {suffixes}")
        return files
    if not path.exists():
        raise UserError(f"{path} does not exist: give a {suffixes} file, a directory of them, or {PYTHON_STDLIB}")
    if path.suffix not in READERS:
        raise UserError(f"{path} is none of {suffixes}: convert it, or rename it if it is plain text")
    return [path]


def read_documents(source: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """The documents of a source: a `datasets.Dataset` with one column, `text`, mapped from disk.

    A .txt file's text is its bytes decoded as UTF-8 and nothing else: no newline is added, dropped or
    translated. The copy lies in `cache_dir` (default HF_DATASETS_CACHE) and is used again while paths, sizes
    and modification times of the files stay as they are. Raises UserError as `preflight` does, and for text
    that cannot be decoded, a line that is not JSON, a row without text.
    """
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    files = preflight(source)
    # Tuples: `datasets` takes a list among these arguments for shards that may be read in any grouping.
    stamps = tuple((str(file.absolute()), stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat()))
    try:
        documents = Dataset.from_generator(
            _documents,
            features=Features({"text": Value("large_string")}),
            cache_dir=os.fspath(cache_dir) if cache_dir else None,
            gen_kwargs={"stamps": stamps, "version": _FORMAT},
        )
    except (DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, OSError):  # the reader tells its own as UserError: what fails here is the writer
            raise cache_error(cause, cache_dir) from error
        raise
    return documents


def cache_error(error: OSError, cache_dir: str | os.PathLike[str] | None) -> UserError:
    """What to tell where prepared data cannot be written: the disk is full, the directory is not ours."""
    from datasets.config import HF_DATASETS_CACHE

    place = cache_dir or HF_DATASETS_CACHE
    return UserError(f"cannot keep prepared data in {place} ({error.strerror or error}): set HF_DATASETS_CACHE")


def hold_out(documents: Dataset, every: int = 20) -> tuple[Dataset, Dataset]:
    """Documents for training and for evaluation: every `every`-th one, from the first, is held out.

    UserError if there are not two documents to share between them.
    """
    if len(documents) < 2:
        raise UserError(f"{len(documents)} document cannot be split for evaluation: give a --validation_file")
    held_out = range(0, len(documents), every)
    kept = [i for i in range(len(documents)) if i % every]
    return documents.select(kept), documents.select(held_out)


def _documents(stamps: tuple[tuple[str, int, int], ...], version: int) -> Iterator[dict[str, str]]:
    """Read one file after the other. Sizes, times and version only mark the cache."""
    for name, _, _ in stamps:
        file = Path(name)
        try:
            for text in READERS.get(file.suffix, READERS[".txt"])(file):
                yield {"text": text}
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror or error}") from error


def _walk(top: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """The files under `top`, sorted by relative path, without hidden ones and the directories `left_out`."""

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
    """The .py files of the standard library of the Python that runs, without tests and installed packages."""
    top = Path(sysconfig.get_path("stdlib"))
    files = (
        [file for file in _walk(top, frozenset(_BESIDE_STDLIB)) if file.suffix == ".py" and decodes(file)]
        if top.is_dir()
        else []
    )
    if not files:
        raise UserError(f"no standard library sources under {top}: give a --train_file")
    return files
