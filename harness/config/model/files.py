"""The weight and tokenizer files of a HuggingFace directory."""

from __future__ import annotations

import os
from pathlib import Path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_SINGLE, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
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
    """Return whether the directory contains a tokenizer's files."""
    return any(Path(directory, name).is_file() for name in TOKENIZER_FILES)
