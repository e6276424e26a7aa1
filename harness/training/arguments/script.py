"""The flags that only the script has: the Trainer gets model and data as objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.hf.locate import DEFAULT_MODEL
from harness.training.arguments.flags import Flags, flag
from harness.training.data.files.sources import PYTHON_STDLIB


@dataclass(kw_only=True)
class ScriptArguments(Flags):
    """What to train on what, as in run_clm.py."""

    TITLE: ClassVar[str] = "Model and data"

    model_name_or_path: str = flag(DEFAULT_MODEL, "a preset's name, or a directory with HuggingFace's config.json")
    tokenizer_name: str | None = flag(
        None, "bytes, or a directory (default: the model directory's tokenizer, else bytes)"
    )
    train_file: str = flag(
        PYTHON_STDLIB,
        ".txt; .jsonl, .parquet (column text; messages; or prompt and completion); or a directory of them",
    )
    validation_file: str | None = flag(
        None, "the same, for evaluation (default: with eval_steps a part of train_file is held out)"
    )
