"""Whole checkpoints of a few bytes, and what happens to them."""

from __future__ import annotations

import json
from pathlib import Path

from harness.checkpoint.directories import TrainingProgress, contents, finish, partial_name


def progress(step: int, **stated: object) -> TrainingProgress:
    """Where a run stood after `step` steps; what else a test wants stated."""
    given = dict(consumed_samples=step, layout="pp1", zero_stage=0, precision="fp32", seed=42, data="d")
    return TrainingProgress(step=step, **{**given, **stated})  # type: ignore[arg-type]


def save(folder: Path, step: int, run_id: str = "") -> Path:
    """Save a checkpoint of two files, one of them in a folder of its own."""
    partial = folder / partial_name(step)
    (partial / "deep").mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"w" * 100 + bytes([step]))
    (partial / "deep" / "other.json").write_bytes(b"r" * 50)
    return finish(folder, progress(step, run_id=run_id), contents(partial))


def change(path: Path, **values: object) -> None:
    """Edit a JSON file by hand."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
