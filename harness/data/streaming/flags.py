"""Refuse flags that a stream cannot follow; this module does not import torch."""

from __future__ import annotations

from harness.arguments import TrainingArguments
from harness.errors import UserError


def require_streamable(args: TrainingArguments, stream: str) -> None:
    """Raise UserError for arguments that a stream cannot follow; `stream` names what makes the data a stream."""
    if args.max_steps < 1:
        raise UserError(f"{stream}: a stream has no length: give --max_steps")
    if args.dataloader_num_workers:
        raise UserError(
            f"--dataloader_num_workers does not work with {stream}: each worker would read and tokenise the whole "
            "stream: leave it out"
        )
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if getattr(args, name) == "epoch":
            raise UserError(f"--{name} epoch: a stream has no epochs: use steps")


def refuse_buffer(args: TrainingArguments) -> None:
    """Raise UserError for a shuffle buffer without a stream."""
    if args.shuffle_buffer_size:
        raise UserError(
            f"--shuffle_buffer_size {args.shuffle_buffer_size} needs --streaming or an IterableDataset: leave it out, "
            "as all samples of other data are shuffled together"
        )
