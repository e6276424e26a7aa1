"""Streams of samples for training: of the script's files, or of an IterableDataset that is given to the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from harness.arguments import TrainingArguments
from harness.data.files.sources import find_files
from harness.data.files.specs import SourceGroup
from harness.data.inputs.sample_form import NEEDS_TOKENIZER, SampleForm
from harness.data.inputs.stream_flags import require_streamable
from harness.data.on_disk.cache import identity
from harness.data.streaming.layouts import AsTheyAre, layout_of
from harness.data.streaming.rows import FileRows, IterableRows, Rows
from harness.data.streaming.source import Streamed, StreamedSource
from harness.data.tokenizer import Tokenizer
from harness.errors import UserError
from harness.hf.skeleton import ModelSource

Say: TypeAlias = Callable[[str], None]


def stream_of_files(
    groups: Sequence[SourceGroup],
    weights: Sequence[float],
    tokenizer: Tokenizer,
    form: SampleForm,
    buffer: int,
    say: Say,
) -> Streamed:
    """Return the samples of files, by weights if there are any."""
    rows = [FileRows([file for path in group.paths for file in find_files(path)], group.kind, say) for group in groups]
    return Streamed([_source(each, tokenizer, form) for each in rows], weights, buffer)


def stream_of_dataset(
    dataset: Iterable[object],
    tokenizer: Tokenizer | None,
    source: ModelSource | None,
    args: TrainingArguments,
    say: Say,
) -> Streamed:
    """Return the samples of an IterableDataset; without a `source`, the model's, as they are."""
    require_streamable(args, "an IterableDataset")
    rows = IterableRows(dataset, "train_dataset", as_they_are=source is None, say=say)
    if rows.kind is None or source is None:
        return Streamed([StreamedSource(rows, AsTheyAre())], buffer=args.shuffle_buffer_size)
    if tokenizer is None:
        raise UserError(NEEDS_TOKENIZER)
    return Streamed([_source(rows, tokenizer, SampleForm.of(tokenizer, source, args))], buffer=args.shuffle_buffer_size)


def _source(rows: Rows, tokenizer: Tokenizer, form: SampleForm) -> StreamedSource:
    layout = layout_of(rows.kind, tokenizer, form.block_size, packing=form.packing)
    return StreamedSource(rows, layout, identity(tokenizer))
