"""The weight and tokenizer files of a HuggingFace directory."""

from __future__ import annotations

import os
from pathlib import Path

from harness.config.values.json_file import member, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OLD_SINGLE = "pytorch_model.bin"
OLD_INDEX = "pytorch_model.bin.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def has_weights(directory: Path) -> bool:
    """Return whether the directory contains weight files or their index."""
    named = (INDEX, OLD_SINGLE, OLD_INDEX)
    return any(directory.glob("*.safetensors")) or any((directory / name).is_file() for name in named)


def has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    return any(Path(directory, name).is_file() for name in TOKENIZER_FILES)


def indexed_files(index: Path) -> list[str]:
    """Return the files that an index of weights lists.

    Raises OSError if it cannot be read, ValueError if it lists none, or one outside its directory.
    """
    listed = member(read_object(index), "weight_map", dict).values()
    outside = [name for name in listed if not isinstance(name, str) or Path(name).name != name]
    if outside or not listed:
        raise ValueError(f"it must list files of its own directory, but lists {outside[:1] or 'none'}")
    return sorted(set(listed))
