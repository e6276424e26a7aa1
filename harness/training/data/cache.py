"""Prepared data on disk: made once on each host, under a name that says what it was made of, and mapped from there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from harness.config.errors import UserError
from harness.training.data.tokenizer import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset, Features

T = TypeVar("T")

_ROWS_AT_ONCE = 256


def map_once(
    documents: Dataset,
    function: Callable[[dict[str, Any]], Any],
    features: Features,
    key: str,
    *,
    cache_dir: str | os.PathLike[str] | None,
    said: str,
) -> Dataset:
    """`documents` mapped by `function`, batch by batch in order, kept as `key` in `cache_dir` and read from there.

    A second call with the same key calls nothing. `said`: what the progress bar says. Raises UserError if the cache
    (default HF_DATASETS_CACHE) cannot be written.
    """
    import datasets

    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "prepared"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return documents.map(
            function,
            batched=True,
            batch_size=_ROWS_AT_ONCE,
            remove_columns=documents.column_names,
            features=features,
            cache_file_name=str(folder / f"{key}.arrow"),
            load_from_cache_file=True,
            new_fingerprint=key,
            desc=said,
        )
    except OSError as error:
        raise cache_error(error, cache_dir) from error


def cache_error(error: OSError, cache_dir: str | os.PathLike[str] | None) -> UserError:
    """What to tell where prepared data cannot be written: the disk is full, the directory is not ours."""
    from datasets.config import HF_DATASETS_CACHE

    place = cache_dir or HF_DATASETS_CACHE
    return UserError(f"cannot keep prepared data in {place} ({error.strerror or error}): set HF_DATASETS_CACHE")


def once_per_host(build: Callable[[], T], *, local_rank: int, barrier: Callable[[], object]) -> T:
    """Let local rank 0 of each host build what is then read from its cache, and the others wait at `barrier`.

    All ranks call it, and the barrier must have the patience for a long corpus. If the building fails the
    barrier is still passed, and the others fail in `build` for themselves: an error, never a hang.
    """
    if local_rank != 0:
        barrier()
        return build()
    try:
        return build()
    finally:
        barrier()


def fingerprint(*parts: object) -> str:
    """A name for prepared data, the same in every process and run: made of what it was made of, of no pickled code."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def identity(tokenizer: Tokenizer) -> str:
    """All that decides how a tokenizer cuts text: not its pickle, which changes with use."""
    if isinstance(tokenizer, ByteTokenizer):
        return repr(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        for state_of_the_last_call in ("truncation", "padding"):
            rules.pop(state_of_the_last_call, None)
        parts = [json.dumps(rules, sort_keys=True)]
    else:
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            parts = [file.read_text(encoding="latin-1") for file in sorted(Path(folder).iterdir())]
    return "\0".join((type(tokenizer).__name__, str(tokenizer.eos_token_id), *parts))
