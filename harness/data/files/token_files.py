"""Map files of token ids that other programs made: Megatron's .bin with .idx, and datatrove's .ds, as nanotron reads.

The files are used in place: nothing is tokenised or copied, and only the header is read beforehand. A Megatron pair may
be given as its .bin, its .idx or its prefix; a directory or glob may hold several files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.data.formats import TOKEN_FORMATS, TokenFile
from harness.errors import UserError


def token_paths(source: str | os.PathLike[str]) -> list[Path]:
    """Return the file of token ids that a path names, or nothing."""
    path = Path(source)
    for each in TOKEN_FORMATS.values():
        if path.suffix == each.suffix:
            return [path]
        if path.suffix == each.index_suffix:
            return [path.with_suffix(each.suffix)]
    pairs = [path.with_name(path.name + each.suffix) for each in TOKEN_FORMATS.values() if each.index_suffix]
    return [pair for pair in pairs if not path.exists() and pair.is_file()][:1]


def open_tokens(path: Path, vocabulary: int) -> TokenFile:
    """Map a token file, and check samples of its ids against the `vocabulary` (number of ids) of the model.

    Raises:
        UserError: the file cannot be read, contradicts its header, or has ids that the model does not know.
    """
    file = _mapped_file(path, vocabulary)
    # Read 64 stretches of 4,096 ids: a file of terabytes would take hours. A few ids reveal a wrong dtype.
    for start in np.linspace(0, max(len(file.ids) - 4096, 0), 64).astype(np.int64):
        part = file.ids[start : start + 4096]
        if int(part.max()) >= vocabulary or int(part.min()) < 0:
            worst = int(part.min()) if int(part.min()) < 0 else int(part.max())
            raise UserError(
                f"{path} has the id {worst} near token {start:,}, but the model's ids are 0 to {vocabulary - 1}: use "
                "the model whose tokenizer made the file"
            )
    return file


def require_token_files(paths: Sequence[Path]) -> None:
    """Raise UserError for a file that is missing or has a wrong header; ids are not read."""
    for path in paths:
        _mapped_file(path, 2**16)


def _mapped_file(path: Path, vocabulary: int) -> TokenFile:
    try:
        file = TOKEN_FORMATS[path.suffix].open(path, vocabulary)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
    if not len(file.ids):
        raise UserError(f"{path} is empty: give tokens to train on")
    return file
